"""How long the index of a dataset takes to build: ours, ours in NumPy, and megatron-core's.

    python benchmarks/data/sample_index.py [--documents N] [--epochs N] [--megatron FILE] [--json FILE]

Documents of 1 to 1319 tokens (660 in the mean), no files: the shuffled documents of all epochs, the
places of the samples, their shuffle, and a blend of as many samples as there are document entries
from five datasets. The contestants take turns, and what they make must be equal. FILE is the
compiled helpers_cpp of an installed megatron-core, which shuffles with NumPy. CPU-seconds are those
of this process, medians; memory is the most that a process of its own holds which builds the three
arrays of the index with the compiled loops, beside what it holds before. Linux only.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]  # also where nothing is installed

from benchmarks.shared.result import add_json, begin, finish, heading  # noqa: E402
from megatron_zpp.data.blend import blend_in_stretches  # noqa: E402
from megatron_zpp.data.native_index import native_index  # noqa: E402
from megatron_zpp.data.sample_index import sample_starts  # noqa: E402

MEAN = 660  # tokens of a document
SHARES = np.array([0.1, 0.15, 0.2, 0.25, 0.3])
PARTS = ("document", "sample", "shuffle", "blend")
OURS, NUMPY, CORE = "ours", "ours, NumPy", "megatron-core"

Arrays = tuple[np.ndarray, ...]
Contestants = Mapping[str, Callable[[], Arrays]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is indexed: `lengths` int32 [documents], so many epochs, samples of `seq_length`."""

    lengths: np.ndarray
    epochs: int
    seq_length: int

    @property
    def tokens(self) -> int:
        """Tokens of all epochs."""
        return self.epochs * int(self.lengths.sum(dtype=np.int64))

    @property
    def samples(self) -> int:
        """Samples in them."""
        return (self.tokens - 1) // self.seq_length

    def entries(self) -> np.ndarray:
        """The documents of all epochs in order; int32."""
        return np.tile(np.arange(len(self.lengths), dtype=np.int32), self.epochs)

    def numbers(self) -> np.ndarray:
        """The samples in order; uint32."""
        return np.arange(self.samples, dtype=np.uint32)


def main() -> int:
    """Verify, take turns, print a table."""
    options = read_options()
    task = make_task(options)
    if options.only_build:
        print(json.dumps(memory_of(task)))
        return 0
    if native_index() is None:
        sys.exit("error: csrc/ is not built here: make setup builds it where there is a compiler")
    result = {
        **begin("sample_index"),
        "documents": options.documents,
        "epochs": options.epochs,
        "seq_length": options.seq_length,
        "tokens": task.tokens,
        "samples": task.samples,
        "parts": measure(task, options),
        "memory": json.loads(in_a_process_of_its_own()),
    }
    finish(result, show, options.json)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--epochs", type=int, default=10, metavar="N")
    parser.add_argument("--seq-length", type=int, default=2048, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--megatron", metavar="FILE", help="helpers_cpp*.so of megatron-core")
    add_json(parser)
    parser.add_argument("--only-build", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def make_task(options: argparse.Namespace) -> Task:
    """The documents' lengths, drawn with a fixed seed."""
    lengths = np.random.RandomState(0).randint(1, 2 * MEAN, options.documents).astype(np.int32)
    return Task(lengths=lengths, epochs=options.epochs, seq_length=options.seq_length)


def contestants(
    task: Task, part: str, document: np.ndarray, core: ModuleType | None
) -> Contestants:
    """Whoever builds a part, by name; each call makes new arrays."""
    if part in ("document", "shuffle"):
        fresh = task.entries if part == "document" else task.numbers
        return {
            OURS: partial(_shuffled, fresh, native_index().shuffle),
            CORE if core else NUMPY: partial(_shuffled, fresh, _numpy_shuffle),
        }
    if part == "sample":
        found = {OURS: native_index().sample_starts, NUMPY: sample_starts}
        made = {name: partial(_starts, task, document, fill) for name, fill in found.items()}
        return made if core is None else made | {CORE: partial(_core_starts, task, document, core)}
    size = len(document)
    made = {
        OURS: partial(native_index().blend, SHARES, size),
        NUMPY: partial(blend_in_stretches, SHARES, size),
    }
    return made if core is None else made | {CORE: partial(_core_blend, size, core)}


def measure(task: Task, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """CPU-seconds of each contestant for each part, round by round."""
    core = load_helpers(options.megatron) if options.megatron else None
    (document,) = _shuffled(task.entries, native_index().shuffle)
    seconds = {}
    for part in PARTS:
        made = contestants(task, part, document, core)
        verify(part, made)
        seconds[part] = {name: [] for name in made}
        for number in range(options.rounds):
            for name in list(made)[:: -1 if number % 2 else 1]:
                start = time.process_time()
                made[name]()
                seconds[part][name].append(time.process_time() - start)
    return seconds


def verify(part: str, made: Contestants) -> None:
    """Exit unless all make the same arrays."""
    expected = made[OURS]()
    for name, make in made.items():
        if not all(map(np.array_equal, make(), expected)):
            sys.exit(f"error: {name} and {OURS} make different arrays of {part}; nothing was timed")


def load_helpers(path: str) -> ModuleType:
    """megatron-core's compiled module, without megatron-core around it."""
    spec = importlib.util.spec_from_file_location("helpers_cpp", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_a_process_of_its_own() -> str:
    """What this program prints with --only-build."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only-build"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def memory_of(task: Task) -> dict[str, int]:
    """Bytes held before, and at most while all is built."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew with what is held now
    before = _peak()
    (document,) = _shuffled(task.entries, native_index().shuffle)
    kept = [document, *_starts(task, document, native_index().sample_starts)]
    kept += _shuffled(task.numbers, native_index().shuffle)
    return {"before": before, "peak": _peak(), "arrays": sum(array.nbytes for array in kept)}


def _shuffled(fresh: Callable[[], np.ndarray], shuffle: Callable) -> Arrays:
    data = fresh()
    shuffle(data, np.random.RandomState(1))
    return (data,)


def _numpy_shuffle(data: np.ndarray, random: np.random.RandomState) -> None:
    random.shuffle(data)


def _starts(task: Task, document: np.ndarray, fill: Callable[..., None]) -> Arrays:
    out = np.zeros((task.samples + 1, 2), dtype=np.int32)
    fill(task.lengths, document, task.seq_length, out)
    return (out,)


def _core_starts(task: Task, document: np.ndarray, core: ModuleType) -> Arrays:
    tokens = task.tokens // task.epochs
    made = core.build_sample_idx_int32(
        task.lengths, document, task.seq_length, task.epochs, tokens, True, 1
    )
    return (made,)


def _core_blend(size: int, core: ModuleType) -> Arrays:
    dataset, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
    core.build_blending_indices(dataset, sample, SHARES, len(SHARES), size, False)
    return dataset, sample


def _peak() -> int:
    # Not ru_maxrss: that begins with what the process held that started this one.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def show(result: dict) -> None:
    """Print the table: medians, and how often each takes the time that ours takes."""
    memory = result["memory"]
    print(
        f"{heading(result, 'python')}\n"
        f"{result['documents'] / 1e6:g} M documents x {result['epochs']} epochs, "
        f"{result['tokens'] / 1e9:.2f} G tokens, {result['samples'] / 1e6:.2f} M samples of "
        f"{result['seq_length']}; arrays equal\n\n"
        f"  {'CPU seconds':14}" + "".join(f"{part:>18}" for part in PARTS)
    )
    for name in (OURS, NUMPY, CORE):
        line = f"  {name:14}"
        for part in PARTS:
            found = result["parts"][part]
            if name not in found:
                line += f"{'':18}"
                continue
            ours, its = statistics.median(found[OURS]), statistics.median(found[name])
            line += f"{its:9.3f} ({its / ours:5.2f}x)"
        print(line)
    print(
        f"\n  memory: {memory['before'] / 1e6:.0f} MB before, at most {memory['peak'] / 1e6:.0f}; "
        f"the three arrays are {memory['arrays'] / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    sys.exit(main())
