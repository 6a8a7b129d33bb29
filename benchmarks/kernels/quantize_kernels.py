"""How fast the kernels of quantization and of steps of codes are, beside a copy of as many bytes.

Every kernel is first compared byte by byte with the plain-torch reference: on the CPU, and at the
sizes that are timed on the kernel's own device. Then kernel, copy, plain torch and, beside AdamW,
other libraries' optimizers run in turn. The copy moves half of the bytes that the kernel reads and
writes in all, so that both move as many bytes, into allocated memory.

On a GPU, times are measured between events, and data larger than half the level-2 cache is evicted
before each run; smaller data stays cached. On the CPU with one thread the copy is memcpy, and times
are the processor time of that thread; with --threads they are times by the clock.
"""

import ctypes
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.kernels.adam_kernel import Peer, adam_cases, adam_peers
from benchmarks.kernels.instruction_sets import use_isa
from benchmarks.kernels.timed_cases import ROWS, Case, cases, requantize_cases
from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.interleaved import interleaved, ratio_summary
from benchmarks.shared.table import RATIOS, Column, table
from benchmarks.shared.timers import THREAD_CLOCK, WALL_CLOCK, CpuTimer, GpuTimer, Timer
from zeropp.errors import InputError
from zeropp.native.kernels import ISAS
from zeropp.quant import cpu, cuda, reference

CHECKED = 1 << 20  # elements, at most, that are compared with the reference on the CPU
GOAL, LARGE = 0.85, 64 << 20  # share of a copy's speed to reach on this many bytes
CPU_ELEMENTS = (1 << 26, 1 << 17)  # beyond every cache; inside level 2
CUDA_ELEMENTS = (1 << 28, 1 << 26, 1 << 21)  # a GiB of fp32; 64 MiB of INT8; inside level 2


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the kernels run, and how they are timed there."""

    device: torch.device
    kernels: cpu.CpuKernels | cuda.CudaKernels
    timer: Timer
    cache: int  # bytes; larger data is not in the cache when a run begins; 0: not controlled
    sample: int  # bytes to move in each measurement, in at most `most` runs
    most: int
    plain_rounds: int  # of plain torch, which is slow on a CPU

    def copy(self, size: int) -> Callable[[], object]:
        """A function that copies `size` bytes."""
        source, target = (torch.ones(size, dtype=torch.uint8, device=self.device) for _ in (0, 1))
        if self.device.type == "cuda" or torch.get_num_threads() > 1:
            return lambda: target.copy_(source)
        copy = ctypes.CDLL(None).memcpy
        copy.argtypes, copy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
        return lambda: copy(target.data_ptr(), source.data_ptr(), size)


def check(options: Options) -> None:
    """Raise InputError for what cannot be timed."""
    if any(count % (256 * ROWS) for count in options.elements or ()):
        raise InputError(f"--elements: give multiples of {256 * ROWS}")
    if options.device == "cuda" and (options.isa or options.threads > 1):
        raise InputError("--isa and --threads are for the CPU: give --device cpu too")


def measure(options: Options, result: dict) -> None:
    """Verify and time."""
    on_cuda = options.device == "cuda"
    place = on_gpu() if on_cuda else on_cpu(options.isa, options.threads)
    sizes = options.elements or (CUDA_ELEMENTS if on_cuda else CPU_ELEMENTS)
    checked = all_cases(place, min(CHECKED, max(sizes)), options.only)
    result |= {
        "device": options.device,
        "kernels": "CUDA" if on_cuda else options.isa or best_isa(),
        "threads": options.threads,
        "rounds": options.rounds,
        "wrong": [case.name for case in checked if not is_right(case, "cpu")],
        "rows": [],
    }
    for elements in sizes:
        for case in all_cases(place, elements, options.only):
            if case.name in result["wrong"]:
                continue
            if is_right(case, place.device):
                result["rows"].append(time_case(place, case, elements, options.rounds))
            else:
                result["wrong"].append(f"{case.name}, {elements} elements")


def on_cpu(isa: str | None, threads: int = 1) -> Place:
    """So many threads, and the kernels of an instruction set."""
    kernels = cpu.backend()
    if kernels is reference:
        raise InputError("there are no kernels to time; build them with make setup")
    if isa is not None and not use_isa(isa):
        raise InputError(f"this processor has no {isa}; give one of {' '.join(ISAS)}")
    torch.set_num_threads(threads)
    timer = CpuTimer(THREAD_CLOCK if threads == 1 else WALL_CLOCK)
    return Place(
        device=torch.device("cpu"), kernels=kernels, timer=timer, cache=0,
        sample=1 << 26, most=1 << 20, plain_rounds=1,
    )  # fmt: skip


def on_gpu() -> Place:
    """The first GPU."""
    device = torch.device("cuda", 0)
    kernels = cuda.backend()
    if kernels is reference:
        raise InputError(
            "there are no CUDA kernels to time; run python setup.py build_ext --inplace where "
            "nvcc is"
        )
    cache = torch.cuda.get_device_properties(device).L2_cache_size // 2
    return Place(
        device=device, kernels=kernels, timer=GpuTimer(device), cache=cache,
        sample=1 << 30, most=50, plain_rounds=1 << 20,
    )  # fmt: skip


def best_isa() -> str:
    """The best instruction set of this processor."""
    return next(name for name in reversed(ISAS) if use_isa(name))


def all_cases(place: Place, elements: int, only: str) -> Iterator[Case]:
    """All kernels at one size whose names contain `only`."""
    found = (
        cases(place.kernels, elements, place.device),
        requantize_cases(place.kernels, elements, place.device),
        adam_cases(elements, place.device),
    )
    yield from (case for case in itertools.chain(*found) if only in case.name)


def is_right(case: Case, device: torch.device | str) -> bool:
    """Whether the kernel's first run writes what the reference writes on `device`."""
    case.run()
    expected = case.expected(*(tensor.to(device) for tensor in case.inputs))
    pairs = zip(case.outputs, expected, strict=True)
    return all(
        torch.equal(actual.to(device).view(torch.uint8), right.view(torch.uint8))
        for actual, right in pairs
    )


def time_case(place: Place, case: Case, elements: int, rounds: int) -> dict:
    """Time kernel, copy, plain torch and peers in turn; a row of the table."""
    peers, failed = working_peers(case)
    copy = place.copy(case.num_bytes // 2)
    runs = {"kernel": case.run, "copy": copy, "plain": lambda: case.expected(*case.inputs)}
    runs |= {peer.name: peer.run for peer in peers}
    times = max(1, min(place.most, place.sample // case.num_bytes))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cold = case.num_bytes > place.cache
    for name in interleaved(list(runs), rounds):
        slow = name == "plain"
        if not slow or len(seconds[name]) < place.plain_rounds:
            mean = place.timer.mean_seconds(runs[name], 1 if slow else times, cold=cold)
            seconds[name].append(mean)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    slower = {name: each / medians["kernel"] for name, each in medians.items()}
    return {
        "kernel": case.name, "elements": elements, "bytes": case.num_bytes,
        "gb_per_s": case.num_bytes / medians["kernel"] / 1e9,
        "copy_gb_per_s": case.num_bytes / medians["copy"] / 1e9,
        **ratio_summary(seconds["copy"], seconds["kernel"]),
        "plain_times_slower": slower["plain"], "seconds": seconds["kernel"],
        "copy": seconds["copy"], "plain": seconds["plain"],
        "in_cache": not cold if place.cache else None, "failed": failed,
        "peers": [
            {"name": peer.name, "differs": peer.differs, "seconds": seconds[peer.name],
             "times_slower": slower[peer.name]}
            for peer in peers
        ],
    }  # fmt: skip


def working_peers(case: Case) -> tuple[list[Peer], list[str]]:
    """The peers that run here, and the errors of those that do not."""
    working, errors = [], []
    try:
        for peer in adam_peers(*case.inputs) if case.op == "adam" else ():
            peer.run()
            working.append(peer)
    except (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        errors.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return working, errors


def show(result: dict) -> str:
    """The kernels beside a copy, other libraries, and what is wrong."""
    on_gpu, rows = result["device"] == "cuda", result["rows"]
    where = "GPU" if on_gpu else f"{result['kernels']}, {result['threads']} threads"
    kernels = table(
        rows,
        Column("", "kernel"),
        Column("elements", "elements"),
        Column("MB", "bytes", ".1f", 1e-6),
        Column("GB/s", "gb_per_s", ".1f"),
        Column("copy, GB/s", "copy_gb_per_s", ".1f"),
        *RATIOS,
        Column("plain torch, x slower", "plain_times_slower", ".1f"),
        Column("in cache", lambda row: {True: "yes", False: "no"}.get(row["in_cache"])),
    )
    peers = [peer | row for row in rows for peer in row["peers"]]
    lines = [
        f"kernels: {where}; every one wrote the reference's bytes before it was timed",
        *(f"not timed, for it does NOT write what the reference writes: {name}"
          for name in result["wrong"]),
        f"\n{kernels}\n",
        "MB, GB/s: bytes read and written; the copy moves as many, half read and half written.",
        *(f"{row['kernel']}, {row['elements']} elements, not compared: {why}"
          for row in rows for why in row["failed"]),
    ]  # fmt: skip
    if peers:
        columns = Column("", "kernel"), Column("elements", "elements")
        times = Column("x the time", "times_slower", ".2f")
        names = Column("library", "name"), Column("which differs", "differs")
        lines.append(f"\n{table(peers, *columns, times, *names)}")
    if on_gpu:
        large = [row for row in rows if row["bytes"] >= LARGE]
        below = [f"{row['kernel']}, {row['elements']} elements: {row['ratio']:.2f}"
                 for row in large if row["ratio"] < GOAL]  # fmt: skip
        lines.append(f"of {len(large)} rows of 64 MiB and more, {len(large) - len(below)} have "
                     f"{GOAL:.0%} or more of the copy's speed")  # fmt: skip
        lines += below
    return "\n".join(lines)


OPTIONS = (
    Flag(
        "--elements",
        (),
        f"multiples of {256 * ROWS}; default on the CPU: {CPU_ELEMENTS}, on a GPU: {CUDA_ELEMENTS}",
        type=int,
    ),
    Flag("--rounds", 15, "samples of each"),
    Flag("--only", "", "kernels whose names contain this, as in AdamW"),
    Flag("--isa", help="of the CPU; default: the best it has", choices=ISAS),
    Flag("--threads", 1, "of the CPU", least=1),
)
BENCHMARK = Benchmark(
    __spec__,
    __doc__,
    measure,
    show,
    OPTIONS,
    has_device=True,
    check=check,
    succeeded=lambda result: not result["wrong"],
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
