"""How long the index of a dataset takes to build, and how much memory: no files, index only.

    python benchmarks/sample_index.py --documents 10000000 --epochs 1
    python benchmarks/sample_index.py --documents 1000000 --epochs 10
    python benchmarks/sample_index.py --documents 1000000 --epochs 10 --numpy

prints one JSON object: CPU-seconds (medians) of the three arrays and of a blend of as many samples
as there are document entries from 5 datasets, and the peak memory of the process before and after.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]  # also where nothing is installed

from megatron_zpp.data import blend, sample_index  # noqa: E402
from megatron_zpp.data.native import native  # noqa: E402
from megatron_zpp.data.sample_index import Epochs  # noqa: E402

MEAN = 660  # tokens of a document
WEIGHTS = [0.1, 0.15, 0.2, 0.25, 0.3]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--numpy", action="store_true", help="without the compiled loops")
    options = parser.parse_args()
    if options.numpy:
        blend.native = sample_index.native = lambda: None
    random = np.random.RandomState(0)
    lengths = random.randint(1, 2 * MEAN, options.documents).astype(np.int32)
    before = _peak_mib()
    seconds = measure(lengths, options)
    report = {
        "documents": options.documents,
        "epochs": options.epochs,
        "seq_length": options.seq_length,
        "compiled": not options.numpy and native() is not None,
        "cpu_seconds": {name: round(value, 4) for name, value in seconds.items()},
        "peak_mib_before_and_after": [before, _peak_mib()],
    }
    print(json.dumps(report))


def measure(lengths: np.ndarray, options: argparse.Namespace) -> dict[str, float]:
    """Median CPU-seconds of each part, by name."""
    sequences = np.arange(options.documents, dtype=np.int32)
    epochs = Epochs(count=options.epochs, samples_before_last=None)
    tokens = options.epochs * int(lengths.sum(dtype=np.int64))
    count = (tokens - 1) // options.seq_length

    def documents() -> np.ndarray:
        return sample_index._documents(sequences, epochs, np.random.RandomState(1))

    document = documents()
    parts: dict[str, Callable[[], object]] = {
        "document": documents,
        "sample": lambda: sample_index._samples(lengths, document, options.seq_length, tokens),
        "shuffle": lambda: sample_index._shuffle(count, epochs, np.random.RandomState(1)),
        "blend": lambda: blend.blend_index(WEIGHTS, len(document)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(options.repeats):
        for name, part in parts.items():
            start = time.process_time()
            part()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    main()
