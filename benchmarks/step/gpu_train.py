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
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist

from benchmarks.shared.result import (
    begin,
    benchmark_parser,
    finish,
    heading,
    parse_with_device,
    save,
)
from benchmarks.shared.training_setup import SHAPE, TrainingSetup
from benchmarks.step.device_comparison import DeviceComparison
from benchmarks.step.device_loops import DEVICE_LOOPS
from benchmarks.step.gpu_utilization import show_size, speeds
from benchmarks.step.hugging_face_peer import is_installed
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


def main() -> int:
    """Run the sizes asked for and print a table of each; 1 if a loop failed."""
    started = time.monotonic()
    options = read_options()
    result = {
        **begin(__spec__.name),
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
    finish(result, show, options.json)
    return 1 if any(size["failed"] for size in result["sizes"]) else 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--sizes", nargs="+", choices=tuple(SIZES), default=DEFAULT_SIZES, help="in this order")
    add("--peers", nargs="*", choices=tuple(DEVICE_LOOPS), default=DEFAULT_PEERS,
        help="in this order")  # fmt: skip
    add("--micro-batch", type=int, metavar="N", help="samples of a forward pass, for all sizes")
    add("--micro-batches", type=int, metavar="N", help="forward passes of a step, for all sizes")
    add("--zero-stage", type=int, default=0, metavar="N", help="of ours (default: 0)")
    add("--num-workers", type=int, default=2, metavar="N",
        help="processes that read our samples (default: 2)")  # fmt: skip
    add("--no-compile", action="store_true", help="ours without --compile")
    add("--rounds", type=int, default=6, help="timed samples of each loop (default: 6)")
    add("--steps", type=int, default=2, help="consecutive steps of a sample (default: 2)")
    add("--minutes", type=float, default=5.0, help="no peer begins later (default: 5)")
    return parse_with_device(parser)


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
    dist.destroy_process_group()


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


def show(result: dict) -> None:
    """Print the tables."""
    print(heading(result, "torch"))
    print(
        f"transformers {result['transformers']}; {result['rounds']} rounds of "
        f"{result['steps']} steps; bf16; medians"
    )
    for size in result["sizes"]:
        show_size(size)


if __name__ == "__main__":
    sys.exit(main())
