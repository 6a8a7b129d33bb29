"""Which kernels a step runs, who copies on the device, and who holds its memory at the peak.

Of our loop and of a bare one, each in a process of its own; tables are also printed to standard
error as soon as they are known. A stack has lines of this project and of FSDP2, the
innermost first, or the ops around where there are none, as in compiled blocks. On a CPU, ops take
the place of kernels, and no memory is shown.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from re import compile as pattern

import torch
from torch.profiler import profile

from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.rank_processes import run_on_ranks
from benchmarks.shared.training_setup import TrainingSetup, joined_ranks
from benchmarks.step.gpu_train import REPEATED_STEPS, SIZES, new_size
from benchmarks.step.training_loops import DEVICE_LOOPS, device_loop, local_weights, ours, unsharded

WARM_UP, MOST, DEPTH = 3, 25, 4  # steps before, rows of a table, lines of a stack
OWN = pattern(r"(?:megatron_zpp|zeropp|benchmarks|torch/optim|torch/distributed/fsdp)/.*")
COPIES = pattern(r"Memcpy DtoD|aten::copy_")
SIGNS = {"alloc": 1, "free_completed": -1}  # of what an allocator does
Numbers = Mapping[str, list[float]]  # by name or stack


def measure(options: Options, result: dict) -> None:
    """Profile the sizes and loops asked for."""
    options.micro_batch = options.micro_batches = None
    pairs = [(name, kind) for name in options.sizes for kind in options.loops]
    result["tables"] = [run_on_ranks(__spec__.name, 1, options, *pair) for pair in pairs]


def on_rank(options: Options, name: str, kind: str) -> str:
    """The tables of one size of a loop."""
    shape, ranks, shown, tables = new_size(options, name)["shape"], joined_ranks(), {}, []
    flags = f"--num-workers 0{' --compile' * (not options.no_compile)}"
    setup = TrainingSetup(shape=shape, ranks=ranks, dtype="bf16", stage=0, extra_flags=flags)
    memory = torch.cuda.memory if ranks.device.type == "cuda" else None
    if memory:
        memory._record_memory_history(max_entries=10**6, stacks="python")
    if kind == "ours":
        loop = ours(setup)
    else:
        empty = local_weights(unsharded(setup)).items()
        weights = {key: 0.02 * torch.randn(each.shape) for key, each in empty}
        loop = device_loop(setup, kind, weights, setup.steps(REPEATED_STEPS))
    for _ in range(WARM_UP):
        loop.step()()
    if memory:
        shown["MiB at the peak"] = at_peak(memory._snapshot()["device_traces"][0]), 2**20
        memory._record_memory_history(None)
    kernels, copies = profiled(lambda: loop.step()(), on_gpu=bool(memory))
    shown |= {"ms of kernels": (kernels, 1e3), "ms of copies on the device": (copies, 1e3)}
    for title, (numbers, unit) in shown.items():
        tables.append(sums(f"{name}, {kind}: {title}", numbers, unit))
        print(f"\n{tables[-1]}", file=sys.stderr, flush=True)
    loop.close()
    return "\n\n".join(tables)


def profiled(run: Callable[[], object], *, on_gpu: bool) -> tuple[Numbers, Numbers]:
    """The microseconds of a run's kernels by name, and of its copies on the device by stack."""
    verbose = torch._C._profiler._ExperimentalConfig(verbose=True)
    with profile(with_stack=True, experimental_config=verbose) as trace:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    kernels, copies = defaultdict(list), defaultdict(list)
    for event in trace.events():
        launched = [(each.name, each.duration) for each in event.kernels]
        if not on_gpu and event.name.startswith("aten::"):
            launched = [(event.name, event.self_cpu_time_total)]
        for name, duration in launched:
            kernels[name].append(duration)
            if COPIES.match(name):
                copies[stack(event.stack) or ops_around(event)].append(duration)
    return kernels, copies


def ops_around(event: torch.autograd.profiler_util.FunctionEvent | None) -> str:
    """The names of an event and of the ops around it, the innermost first."""
    names = []
    while event is not None and len(names) < DEPTH:
        names.append(event.name)
        event = event.cpu_parent
    return " < ".join(names)


def at_peak(trace: Sequence[Mapping]) -> Numbers:
    """The bytes that an allocator holds when it holds most, by stack; `trace` is its history."""
    total, largest, end, live = 0, 0, 0, {}
    for index, entry in enumerate(trace, 1):
        total += SIGNS.get(entry["action"], 0) * entry["size"]
        if total > largest:
            largest, end = total, index
    for entry in trace[:end]:
        if SIGNS.get(entry["action"]) == 1:
            live[entry["addr"]] = entry
        elif entry["action"] in SIGNS:
            live.pop(entry["addr"], None)
    held = defaultdict(list)
    for entry in live.values():
        lines = (f"{each['filename']}({each['line']}): {each['name']}" for each in entry["frames"])
        held[stack(lines) or "elsewhere"].append(entry["size"])
    return held


def stack(lines: Iterable[str]) -> str:
    """The innermost lines that are of interest."""
    return " < ".join([match[0] for match in map(OWN.search, lines) if match][:DEPTH])


def sums(title: str, numbers: Numbers, unit: float) -> str:
    """A table of the largest sums, and of how many numbers they are, and the sum of all."""
    rows = [(sum(each) / unit, len(each), name[:400]) for name, each in numbers.items()]
    total = sum(row[0] for row in rows), sum(row[1] for row in rows), "in all"
    lines = [f"| {title} | of | |", "|---|---|---|"]
    lines += [
        f"| {number:10.3f} | {count:5} | {name} |"
        for number, count, name in (*sorted(rows, reverse=True)[:MOST], total)
    ]
    return "\n".join(lines)


OPTIONS = (
    Flag("--sizes", ("124M", "1.3B"), "in this order", choices=tuple(SIZES)),
    Flag("--loops", ("ours", "blocks"), "in this order", choices=("ours", *DEVICE_LOOPS)),
    Flag("--no-compile", False, "ours without --compile"),
)
BENCHMARK = Benchmark(
    __spec__, __doc__, measure, lambda result: "\n\n".join(result["tables"]), OPTIONS,
    has_device=True,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
