"""How well a training step uses a GPU: FLOP/s, MFU, tokens and memory, beside plain PyTorch.

    python -m benchmarks.step.gpu_train [--sizes 1.3B 124M 350M] [--peers blocks hf whole]
        [--json FILE]

Ours is the step of pretrain_gpt.py --bf16 --compile on synthetic samples, read by worker processes.
Its peers, loops in plain PyTorch, keep their batches in the GPU's memory. Each must show our losses
and gradient norms for two steps before it is timed; then the two take a few steps in turn.

FLOPs are those of `flops_per_token`: no recomputation, attention over the whole sequence. MFU
is model FLOP/s over the measured rate of square bf16 products, as with --log-throughput. With
several sizes each runs in its own process.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

import torch

from benchmarks.shared.benchmark import SHAPE, Benchmark, Flag
from benchmarks.shared.result import save
from benchmarks.shared.table import RATIOS, Column, table
from benchmarks.shared.training_setup import TrainingSetup
from benchmarks.step.device_loops import DEVICE_LOOPS
from benchmarks.step.hugging_face_peer import is_installed
from benchmarks.step.loop_comparison import DeviceComparison
from benchmarks.step.training_loops import unsharded
from megatron_zpp.model.flops import flops_per_token
from megatron_zpp.monitor.matmul_rate import measure_matmul_rate
from megatron_zpp.parallel.mesh import join_ranks
from megatron_zpp.settings.config import ParallelConfig, RecomputeConfig
from zeropp.ranks.topology import Environment

ROOT = Path(__file__).resolve().parents[2]
SIZES = MappingProxyType(
    {  # the values of SHAPE; micro-batches for 80 GB with a peer's model beside ours
        "1.3B": (24, 2048, 16, 2048, 50257, 4, 2),
        "124M": (12, 768, 12, 1024, 50257, 32, 2),
        "350M": (24, 1024, 16, 1024, 50257, 16, 2),
        "tiny": (2, 64, 2, 32, 500, 2, 2),
    }
)
DEFAULT_SIZES = ("1.3B", "124M", "350M")
DEFAULT_PEERS = ("blocks", "hf", "whole")
SECONDS_TO_END = 30.0  # beyond --minutes, for a size in its own process


def measure(options: argparse.Namespace, result: dict) -> None:
    """Run the sizes asked for; what is measured is saved after each part."""
    started = time.monotonic()
    result |= {
        "device": options.device,
        "transformers": version("transformers") if is_installed() else "not installed",
        "rounds": options.rounds,
        "steps": options.steps,
        "sizes": [],
    }
    for name in options.sizes:
        left = 60 * options.minutes - (time.monotonic() - started)
        if len(options.sizes) == 1:
            size = new_size(name, options)
            result["sizes"].append(size)
            measure_size(size, options, left, lambda: save(result, options.json))
        else:
            result["sizes"].append(measure_in_own_process(name, options, left))
            save(result, options.json)


def new_size(name: str, options: argparse.Namespace) -> dict:
    """The result of a size before it runs."""
    overrides = {"micro-batch": options.micro_batch, "micro-batches": options.micro_batches}
    shape = dict(zip(SHAPE, SIZES[name], strict=True))
    shape |= {part: value for part, value in overrides.items() if value}
    return {
        "size": name,
        "shape": shape,
        "ours": None,
        "peers": [],
        "failed": [],
        "not_run": [],
        "compiled": not options.no_compile,
    }


def measure_size(
    size: dict, options: argparse.Namespace, seconds: float, save_result: Callable[[], None]
) -> None:
    """Fill in `size`, and call `save_result` after each part; no peer begins after `seconds`."""
    until = time.monotonic() + seconds
    ranks = join_ranks(Environment.read(), ParallelConfig())
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
        comparison = DeviceComparison(setup, options.rounds, options.steps)
        compare_all(size, comparison, options.peers, until, save_result)
    except RuntimeError as error:
        record_failure(size, "ours", error)
    save_result()


def compare_all(
    size: dict,
    comparison: DeviceComparison,
    peers: Sequence[str],
    until: float,
    save_result: Callable[[], None],
) -> None:
    """Compare ours with each peer that there is time for; without any, time it alone."""
    for name in peers:
        kind = DEVICE_LOOPS[name]
        if kind.hugging_face and not is_installed():
            size["not_run"].append(f"{kind.name}: transformers is not installed")
        elif time.monotonic() > until:
            size["not_run"].append(f"{kind.name}: the time was up")
        else:
            print(f"{size['size']}: {kind.name}", file=sys.stderr, flush=True)
            try:
                row = comparison.compare(kind)
                size["peers"].append(row | speeds(row["seconds"], size))
            except RuntimeError as error:
                record_failure(size, kind.name, error)
            free_device_memory()
            save_result()
    if not comparison.measured.seconds:
        comparison.time_alone()
    ours = comparison.measured
    size["ours"] = {
        "name": ours.name,
        "seconds": ours.seconds,
        "peak_bytes": ours.peak_bytes or None,
        **speeds(ours.seconds, size),
    }
    comparison.close()


def free_device_memory() -> None:
    """Return the device's memory that a dropped model held."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def record_failure(size: dict, name: str, error: RuntimeError) -> None:
    """Print the traceback, and keep the first line of the message."""
    traceback.print_exception(error)
    size["failed"].append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")


def measure_in_own_process(name: str, options: argparse.Namespace, seconds: float) -> dict:
    """The result of one size from another run of this benchmark."""
    size, failure, seconds = new_size(name, options), None, max(seconds, 0)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--sizes", name]
        command += ["--json", str(answer), "--minutes", str(seconds / 60)]
        limit = seconds + SECONDS_TO_END
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, timeout=limit)
            if done.returncode:
                failure = f"it ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"it did not end within --minutes and {SECONDS_TO_END:.0f} seconds"
        if answer.exists():
            (size,) = json.loads(answer.read_text())["sizes"]
    if failure and not size["failed"]:
        size["failed"].append(f"{name}: {failure}")
    return size


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
    shape = ", ".join(f"{name} {value}" for name, value in size["shape"].items())
    lines = [f"{size['size']}: {shape}" + ("" if size["compiled"] else "; ours not compiled")]
    if "product_rate" in size:
        lines.append(
            f"{size['parameters']:,} parameters, {size['flops_per_token'] / 1e9:.4g} GFLOP per "
            f"token; bf16 products: {size['product_rate'] / 1e12:.4g} TFLOP/s"
        )
    ours = [{"ratio": None, "quartiles": None} | size["ours"]] if size["ours"] else []
    loops = table(
        [*ours, *size["peers"]],
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


BENCHMARK = Benchmark(
    spec=__spec__,
    question=__doc__,
    flags=(
        Flag("--sizes", DEFAULT_SIZES, "in this order", choices=tuple(SIZES)),
        Flag("--peers", DEFAULT_PEERS, "in this order", choices=tuple(DEVICE_LOOPS)),
        Flag("--micro-batch", help="samples of a forward pass, for all sizes", type=int),
        Flag("--micro-batches", help="forward passes of a step, for all sizes", type=int),
        Flag("--zero-stage", 0, "of ours"),
        Flag("--num-workers", 2, "processes that read our samples"),
        Flag("--no-compile", False, "ours without --compile"),
        Flag("--rounds", 6, "timed samples of each loop"),
        Flag("--steps", 2, "consecutive steps of a sample"),
        Flag("--minutes", 5.0, "no peer begins later"),
    ),
    has_device=True,
    measure=measure,
    show=show,
    succeeded=lambda result: not any(size["failed"] for size in result["sizes"]),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
