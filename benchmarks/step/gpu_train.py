"""How well a training step uses a GPU: FLOP/s, MFU, tokens and memory, beside plain PyTorch.

Ours is the step of pretrain_gpt.py --bf16 --compile on synthetic samples, read by worker processes.
Its peers, loops in plain PyTorch, keep their batches in the GPU's memory. Each must show our losses
and gradient norms for two steps before it is timed; then the two take a few steps in turn.

FLOPs are those of `flops_per_token`: no recomputation, attention over the whole sequence. MFU
is model FLOP/s over the measured rate of square bf16 products, as with --log-throughput. Each size
runs in a process of its own, so that one that fails does not end the others.
"""

import gc
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from types import MappingProxyType

import torch

from benchmarks.shared.benchmark import SHAPE, Benchmark, Flag, Options, shape_text
from benchmarks.shared.interleaved import ratio_summary
from benchmarks.shared.rank_processes import RankFailed, run_on_ranks
from benchmarks.shared.result import save
from benchmarks.shared.table import RATIOS, Column, table
from benchmarks.shared.training_setup import TrainingSetup, joined_ranks
from benchmarks.step.comparison import (
    TimedLoop,
    largest_differences,
    require_agreement,
    time_in_turn,
    tolerances,
)
from benchmarks.step.training_loops import (
    DEVICE_LOOPS,
    TrainingLoop,
    device_loop,
    local_weights,
    ours,
    unsharded,
    why_not,
)
from megatron_zpp.model.flops import flops_per_token
from megatron_zpp.monitor.matmul_rate import measure_matmul_rate
from megatron_zpp.settings.config import RecomputeConfig

SIZES = MappingProxyType(
    {  # the values of SHAPE; micro-batches for 80 GB with a peer's model beside ours
        "1.3B": (24, 2048, 16, 2048, 50257, 4, 2),
        "124M": (12, 768, 12, 1024, 50257, 32, 2),
        "350M": (24, 1024, 16, 1024, 50257, 16, 2),
        "tiny": (2, 64, 2, 32, 500, 2, 2),
    }
)
VERIFIED_STEPS = 2
REPEATED_STEPS = 4  # steps whose batches a PyTorch loop repeats


def measure(options: Options, result: dict) -> None:
    """Run the sizes asked for; what is measured is saved after each."""
    until = time.monotonic() + 60 * options.minutes
    result |= {"device": options.device, "rounds": options.rounds, "steps": options.steps}
    result |= {"transformers": why_not("hf") or version("transformers"), "sizes": []}
    for name in options.sizes:
        minutes = max(until - time.monotonic(), 0) / 60
        try:
            size = run_on_ranks(__spec__.name, 1, options, name, minutes)
        except RankFailed as failure:
            size = new_size(options, name) | {"failed": [f"{name}: {failure}"]}
        result["sizes"].append(size)
        save(result, options.json)


def new_size(options: Options, name: str) -> dict:
    """The result of a size before it runs."""
    overrides = {"micro-batch": options.micro_batch, "micro-batches": options.micro_batches}
    shape = dict(zip(SHAPE, SIZES[name], strict=True))
    shape |= {part: value for part, value in overrides.items() if value}
    lists = {"peers": [], "failed": [], "not_run": []}
    return {"size": name, "shape": shape, "ours": None, **lists, "compiled": not options.no_compile}


def on_rank(options: Options, name: str, minutes: float) -> dict:
    """The result of one size; no peer begins after `minutes`."""
    until = time.monotonic() + 60 * minutes
    size, ranks = new_size(options, name), joined_ranks()
    compile_flag = "" if options.no_compile else " --compile"
    setup = TrainingSetup(
        shape=size["shape"],
        ranks=ranks,
        dtype="bf16",
        stage=options.zero_stage,
        extra_flags=f"--num-workers {options.num_workers}{compile_flag}",
    )
    model, shape = unsharded(setup), size["shape"]
    size |= {
        "parameters": model.num_parameters(),
        "flops_per_token": flops_per_token(model.config, RecomputeConfig(), model.vocab_size),
        "tokens_per_step": shape["micro-batch"] * shape["micro-batches"] * shape["seq"],
        "product_rate": measure_matmul_rate(ranks.device, torch.bfloat16),
    }
    try:
        compare_all(size, DeviceComparison(setup, options.rounds, options.steps), options, until)
    except RuntimeError as error:
        record_failure(size, "ours", error)
    return size


class DeviceComparison:
    """Our loop for one setup, beside PyTorch loops on one device that come and go.

    At most two models are in memory.
    """

    def __init__(self, setup: TrainingSetup, rounds: int, steps: int) -> None:
        self.setup, self.rounds, self.steps = setup, rounds, steps
        self._repeated = setup.steps(REPEATED_STEPS)
        self._weights: dict[str, torch.Tensor] = {}  # before the first step

        def build() -> TrainingLoop:
            loop = ours(setup)
            weights = local_weights(loop.model)
            self._weights = {name: each.to("cpu", copy=True) for name, each in weights.items()}
            return loop

        self.ours = TimedLoop.build(build, setup, VERIFIED_STEPS)

    def compare(self, kind: str) -> dict:
        """Verify a PyTorch loop and time it; returns its row. Raises Disagreement."""
        build = partial(device_loop, self.setup, kind, self._weights, self._repeated)
        ours_before, mine = len(self.ours.seconds), self.ours
        theirs = TimedLoop.build(build, self.setup, VERIFIED_STEPS)
        differences = largest_differences(theirs.history, mine.history)
        require_agreement(theirs.name, "ours", differences, tolerances(self.setup.dtype, 1))
        time_in_turn([mine, theirs], self.setup, self.rounds, self.steps)
        our_seconds = mine.seconds[ours_before:]
        return {
            "name": theirs.name,
            "seconds": theirs.seconds,
            "our_seconds": our_seconds,
            "peak_bytes": theirs.peak_bytes or None,
            "verified": differences,
            **ratio_summary(theirs.seconds, our_seconds),
        }

    def time_alone(self) -> None:
        """Time our loop where it could be compared with none."""
        time_in_turn([self.ours], self.setup, self.rounds, self.steps)


def compare_all(size: dict, comparison: DeviceComparison, options: Options, until: float) -> None:
    """Compare ours with each peer that there is time for; without any, time it alone."""
    for kind in options.peers:
        title = DEVICE_LOOPS[kind]
        reason = why_not(kind) or ("the time was up" if time.monotonic() > until else None)
        if reason:
            size["not_run"].append(f"{title}: {reason}")
            continue
        print(f"{size['size']}: {title}", file=sys.stderr, flush=True)
        try:
            row = comparison.compare(kind)
            size["peers"].append(row | speeds(row["seconds"], size))
        except RuntimeError as error:
            record_failure(size, title, error)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # of the model that was dropped
    if not comparison.ours.seconds:
        comparison.time_alone()
    mine = comparison.ours
    numbers = {"name": mine.name, "seconds": mine.seconds, "peak_bytes": mine.peak_bytes or None}
    size["ours"] = numbers | speeds(mine.seconds, size)
    mine.loop.close()


def record_failure(size: dict, name: str, error: RuntimeError) -> None:
    """Print the traceback, and keep the first line of the message."""
    traceback.print_exception(error)
    size["failed"].append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")


def speeds(seconds: Sequence[float], size: Mapping) -> dict[str, float]:
    """The median of step times in seconds, and the rates it means for a size of `gpu_train`."""
    median = statistics.median(seconds)
    tokens = size["tokens_per_step"] / median
    flops = tokens * size["flops_per_token"]
    return {
        "median": median,
        "tokens_per_s": tokens,
        "flops_per_s": flops,
        "mfu": flops / size["product_rate"],
    }


def show(result: dict) -> str:
    """A section for each size."""
    title = (
        f"transformers {result['transformers']}; {result['rounds']} rounds of "
        f"{result['steps']} steps; bf16; medians"
    )
    return "\n\n".join([title, *map(show_size, result["sizes"])])


def show_size(size: Mapping) -> str:
    """The table of one size, and what did not run."""
    lines = [f"{size['size']}: {shape_text(size)}{'; ours not compiled' * (not size['compiled'])}"]
    if "product_rate" in size:
        lines.append(
            f"{size['parameters']:,} parameters, {size['flops_per_token'] / 1e9:.4g} GFLOP per "
            f"token; bf16 products: {size['product_rate'] / 1e12:.4g} TFLOP/s"
        )
    own = [{"ratio": None, "quartiles": None} | size["ours"]] if size["ours"] else []
    loops = table(
        [*own, *size["peers"]],
        Column("", "name"),
        Column("ms/step", "median", ".2f", 1e3),
        Column("tokens/s", "tokens_per_s", ".0f"),
        Column("TFLOP/s", "flops_per_s", ".4g", 1e-12),
        Column("MFU", "mfu", ".1%"),
        Column("peak, GB", "peak_bytes", ".2f", 1e-9),
        *RATIOS,
    )
    lines += ["", loops, ""]
    for peer in size["peers"]:
        differences = [f"{what} within {value:.1e}" for what, value in peer["verified"].items()]
        lines.append(f"{peer['name']}: verified, {', '.join(differences)}")
    lines += [f"failed: {reason}" for reason in size["failed"]]
    lines += [f"not run: {reason}" for reason in size["not_run"]]
    return "\n".join(lines)


OPTIONS = (
    Flag("--sizes", ("1.3B", "124M", "350M"), "in this order", choices=tuple(SIZES)),
    Flag("--peers", ("blocks", "hf"), "in this order", choices=tuple(DEVICE_LOOPS)),
    Flag("--micro-batch", help="samples of a forward pass, for all sizes", type=int),
    Flag("--micro-batches", help="forward passes of a step, for all sizes", type=int),
    Flag("--zero-stage", 0, "of ours"),
    Flag("--num-workers", 2, "processes that read our samples"),
    Flag("--no-compile", False, "ours without --compile"),
    Flag("--rounds", 6, "timed samples of each loop"),
    Flag("--steps", 2, "consecutive steps of a sample"),
    Flag("--minutes", 5.0, "no peer begins later"),
)
BENCHMARK = Benchmark(
    __spec__,
    __doc__,
    measure,
    show,
    OPTIONS,
    has_device=True,
    succeeded=lambda result: not any(size["failed"] for size in result["sizes"]),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
