"""How long the index of a dataset takes to build: ours, ours in NumPy, and megatron-core's.

For documents of 1 to 1319 tokens (mean 660), without files: the shuffled documents of all epochs,
the samples' positions, their shuffle, and a blend of five datasets with as many samples as there
are document entries. The implementations take turns, and their arrays must be equal. --megatron is
the compiled helpers_cpp of an installed megatron-core, which shuffles with NumPy. Times are median
CPU-seconds of this process.
"""

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import numpy as np

from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.interleaved import Disagreement, time_interleaved
from benchmarks.shared.table import Column, table
from benchmarks.shared.timers import CpuTimer
from megatron_zpp.data.blend import blend_in_python
from megatron_zpp.data.native_index import native_index
from megatron_zpp.data.sample_index import sample_starts
from zeropp.errors import InputError

MEAN_TOKENS = 660  # of a document
SHARES = np.array([0.1, 0.15, 0.2, 0.25, 0.3])
PARTS = ("document", "sample", "shuffle", "blend")
OURS, NUMPY, CORE = "ours", "ours, NumPy", "megatron-core"

Arrays = tuple[np.ndarray, ...]
Builders = Mapping[str, Callable[[], Arrays]]  # by the name of the implementation


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is indexed: documents of `lengths` int32 [documents], in samples of `seq_length`."""

    lengths: np.ndarray
    epochs: int
    seq_length: int

    @property
    def tokens(self) -> int:
        """Tokens of all epochs."""
        return self.epochs * int(self.lengths.sum(dtype=np.int64))

    @property
    def samples(self) -> int:
        """Samples of all epochs."""
        return (self.tokens - 1) // self.seq_length

    def entries(self) -> np.ndarray:
        """The documents of all epochs in order; int32."""
        return np.tile(np.arange(len(self.lengths), dtype=np.int32), self.epochs)

    def numbers(self) -> np.ndarray:
        """The samples in order; uint32."""
        return np.arange(self.samples, dtype=np.uint32)


def check(options: Options) -> None:
    """Raise InputError where there is nothing to time."""
    if native_index() is None:
        raise InputError("csrc/ is not built; make setup builds it where there is a compiler")


def measure(options: Options, result: dict) -> None:
    """Draw the documents' lengths with a fixed seed, verify, time."""
    lengths = np.random.RandomState(0).randint(1, 2 * MEAN_TOKENS, options.documents)
    lengths = lengths.astype(np.int32)
    task = Task(lengths=lengths, epochs=options.epochs, seq_length=options.seq_length)
    core = load_helpers(options.megatron) if options.megatron else None
    timer, seconds = CpuTimer(time.process_time), {}
    for part, implementations in builders(task, core).items():
        verify(part, implementations)
        seconds[part] = time_interleaved(implementations, options.rounds, timer.seconds)
    result |= {
        "documents": options.documents,
        "epochs": options.epochs,
        "seq_length": options.seq_length,
        "tokens": task.tokens,
        "samples": task.samples,
        "parts": seconds,
    }


def builders(task: Task, core: ModuleType | None) -> dict[str, Builders]:
    """The implementations of each part; each call makes new arrays."""
    native = native_index()

    def shuffled(ordered: Callable[[], np.ndarray], shuffle: Callable) -> Arrays:
        data = ordered()
        shuffle(data, np.random.RandomState(1))
        return (data,)

    def in_numpy(data: np.ndarray, random: np.random.RandomState) -> None:
        random.shuffle(data)

    (document,) = shuffled(task.entries, native.shuffle)
    size, lengths, seq_length = len(document), task.lengths, task.seq_length

    def filled(fill: Callable[..., None]) -> Arrays:
        out = np.zeros((task.samples + 1, 2), dtype=np.int32)
        fill(lengths, document, seq_length, out)
        return (out,)

    def core_starts() -> Arrays:
        tokens = task.tokens // task.epochs
        build = core.build_sample_idx_int32
        return (build(lengths, document, seq_length, task.epochs, tokens, True, 1),)

    def core_blend() -> Arrays:
        dataset, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
        core.build_blending_indices(dataset, sample, SHARES, len(SHARES), size, False)
        return dataset, sample

    def shuffles(ordered: Callable[[], np.ndarray]) -> Builders:
        native_one, other = (
            partial(shuffled, ordered, each) for each in (native.shuffle, in_numpy)
        )
        return {OURS: native_one, CORE if core else NUMPY: other}

    return {
        "document": shuffles(task.entries),
        "sample": {
            OURS: partial(filled, native.sample_starts),
            NUMPY: partial(filled, sample_starts),
            **({CORE: core_starts} if core else {}),
        },
        "shuffle": shuffles(task.numbers),
        "blend": {
            OURS: partial(native.blend, SHARES, size),
            NUMPY: partial(blend_in_python, SHARES, size),
            **({CORE: core_blend} if core else {}),
        },
    }


def verify(part: str, implementations: Builders) -> None:
    """Raise Disagreement unless all make the same arrays."""
    expected = implementations[OURS]()
    for name, build in implementations.items():
        if not all(map(np.array_equal, build(), expected)):
            raise Disagreement(
                f"{name} and {OURS} make different arrays of {part}; nothing was timed"
            )


def load_helpers(path: str) -> ModuleType:
    """Import megatron-core's compiled module from its file alone."""
    spec = importlib.util.spec_from_file_location("helpers_cpp", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def show(result: dict) -> str:
    """Medians, and in brackets ratios to ours."""
    parts = result["parts"]

    def cell(name: str, part: str) -> str | None:
        if name not in parts[part]:
            return None
        ours, median = (statistics.median(parts[part][each]) for each in (OURS, name))
        return f"{median:.3f} ({median / ours:.2f} x)"

    rows = [
        {"name": name} | {part: cell(name, part) for part in PARTS} for name in (OURS, NUMPY, CORE)
    ]
    times = table(rows, Column("CPU seconds", "name"), *(Column(part, part) for part in PARTS))
    return (
        f"{result['documents'] / 1e6:g} M documents x {result['epochs']} epochs, "
        f"{result['tokens'] / 1e9:.2f} G tokens, {result['samples'] / 1e6:.2f} M samples of "
        f"{result['seq_length']}; arrays equal\n\n{times}"
    )


OPTIONS = (
    Flag("--documents", 1_000_000),
    Flag("--epochs", 10),
    Flag("--seq-length", 2048),
    Flag("--rounds", 5),
    Flag("--megatron", help="helpers_cpp*.so of megatron-core"),
)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS, check=check)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
