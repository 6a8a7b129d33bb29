"""How well a training step fills a GPU: model FLOP/s, MFU, tokens, memory, beside plain PyTorch.

    python benchmarks/step/gpu_train.py [--sizes 1.3B 124M 350M] [--peers blocks hf whole] [--json FILE]

Ours is the step of pretrain_gpt.py --bf16 --compile on made-up samples, read by worker processes.
Its peers hold their batches in the GPU's memory. Each must show the losses and gradient norms of
ours for two steps before it is timed; then the two take a few steps in turn, round by round.

FLOPs are those of `GPT.flops_per_token`: no recomputation, attention over the whole sequence. MFU
is model FLOP/s over the rate of square bf16 products, measured right before as for
--log-throughput. With several sizes each runs in a process of its own.
"""

import argparse
import gc
import json
import os
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

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.shared.result import add_json, begin, finish, heading  # noqa: E402
from benchmarks.shared.setting import SHAPE, Setting  # noqa: E402
from benchmarks.step.contestants import unsharded  # noqa: E402
from benchmarks.step.duel import Duels  # noqa: E402
from benchmarks.step.fill import show_size, speeds  # noqa: E402
from benchmarks.step.hugging_face_peer import is_installed  # noqa: E402
from benchmarks.step.loops import BARE  # noqa: E402
from megatron_zpp.monitor.matmul_rate import measure_matmul_rate  # noqa: E402
from megatron_zpp.parallel.mesh import join_ranks  # noqa: E402
from megatron_zpp.settings.config import ParallelConfig  # noqa: E402
from zeropp.atomic import write_atomically  # noqa: E402
from zeropp.ranks.topology import Environment  # noqa: E402

SIZES = MappingProxyType(
    {  # the values of SHAPE; micro-batches for 80 GB with a peer's model beside ours
        "1.3B": (24, 2048, 16, 2048, 50257, 4, 2),
        "124M": (12, 768, 12, 1024, 50257, 32, 2),
        "350M": (24, 1024, 16, 1024, 50257, 16, 2),
        "tiny": (2, 64, 2, 32, 500, 2, 2),
    }
)
USUAL = ("1.3B", "124M", "350M")
PEERS = ("blocks", "hf", "whole")
GRACE = 30.0  # seconds beyond --minutes that a size may take to end


def main() -> int:
    """Run the sizes asked for and print a table of each; 1 if a contestant failed."""
    started = time.monotonic()
    options = read_options()
    result = {
        **begin("gpu_train"),
        "device": options.device,
        "transformers": version("transformers") if is_installed() else "not installed",
        "rounds": options.rounds,
        "steps": options.steps,
        "sizes": [],
    }
    for size in options.sizes:
        left = 60 * options.minutes - (time.monotonic() - started)
        if len(options.sizes) == 1:
            found = new(size, options)
            result["sizes"].append(found)
            fill_in(found, options, left, lambda: save(result, options.json))
        else:
            result["sizes"].append(in_a_process(size, options, left))
            save(result, options.json)
    finish(result, show, options.json)
    return 1 if any(found["failed"] for found in result["sizes"]) else 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    add("--sizes", nargs="+", choices=tuple(SIZES), default=USUAL, help="in this order")
    add("--peers", nargs="*", choices=tuple(BARE), default=PEERS, help="in this order")
    add("--micro-batch", type=int, metavar="N", help="samples of a forward pass, for all sizes")
    add("--micro-batches", type=int, metavar="N", help="forward passes of a step, for all sizes")
    add("--zero-stage", type=int, default=0, metavar="N", help="of ours (default: 0)")
    add("--num-workers", type=int, default=2, metavar="N", help="that read for ours (default: 2)")
    add("--no-compile", action="store_true", help="ours without --compile")
    add("--rounds", type=int, default=6, help="samples of each (default: 6)")
    add("--steps", type=int, default=2, help="of one sample, after each other (default: 2)")
    add("--minutes", type=float, default=5.0, help="no peer begins later (default: 5)")
    add_json(parser)
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU; give --device cpu")
    return options


def new(size: str, options: argparse.Namespace) -> dict:
    """What is known of a size before it runs."""
    given = {"micro-batch": options.micro_batch, "micro-batches": options.micro_batches}
    shape = dict(zip(SHAPE, SIZES[size], strict=True))
    shape |= {name: value for name, value in given.items() if value}
    return {
        "size": size, "shape": shape, "ours": None, "peers": [], "failed": [], "not_run": [],
        "compiled": not options.no_compile,
    }  # fmt: skip


def fill_in(
    found: dict, options: argparse.Namespace, left: float, save: Callable[[], None]
) -> None:
    """Measure a size into `found`, which `save` stores after each step of the way."""
    until = time.monotonic() + left
    ranks = join_ranks(Environment.read(), ParallelConfig())
    more = f"--num-workers {options.num_workers}" + ("" if options.no_compile else " --compile")
    setting = Setting(
        shape=tuple(found["shape"].items()), ranks=ranks, dtype="bf16", stage=options.zero_stage,
        more=more,
    )  # fmt: skip
    model, shape = unsharded(setting), found["shape"]
    found |= {
        "parameters": model.num_parameters(),
        "flops_per_token": model.flops_per_token(),
        "tokens_per_step": shape["micro-batch"] * shape["micro-batches"] * shape["seq"],
        "product_rate": measure_matmul_rate(ranks.device, torch.bfloat16),
    }
    try:
        meet_all(found, Duels(setting, options.rounds, options.steps), options.peers, until, save)
    except RuntimeError as error:
        failed(found, "ours", error)
    save()
    dist.destroy_process_group()


def meet_all(
    found: dict, duels: Duels, peers: Sequence[str], until: float, save: Callable[[], None]
) -> None:
    """Let ours meet each peer that there is time for; if none can be met, it runs alone."""
    for name in peers:
        how = BARE[name]
        if how.hugging_face and not is_installed():
            found["not_run"].append(f"{how.name}: transformers is not installed")
        elif time.monotonic() > until:
            found["not_run"].append(f"{how.name}: the time was up")
        else:
            print(f"{found['size']}: {how.name}", file=sys.stderr, flush=True)
            try:
                row = duels.meet(how)
                found["peers"].append(row | speeds(row["seconds"], found))
            except RuntimeError as error:
                failed(found, how.name, error)
            give_back_memory()
            save()
    if not duels.measured.seconds:
        duels.alone()
    ours = duels.measured
    found["ours"] = {
        "name": ours.name, "seconds": ours.seconds, "peak_bytes": ours.peak or None,
        **speeds(ours.seconds, found),
    }  # fmt: skip
    duels.close()


def give_back_memory() -> None:
    """Let the device's memory go that a dropped model held."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def failed(found: dict, name: str, error: RuntimeError) -> None:
    """Note what went wrong, and tell it whole on the standard error."""
    traceback.print_exception(error)
    found["failed"].append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")


def in_a_process(size: str, options: argparse.Namespace, left: float) -> dict:
    """What this script finds of one size when it is run again for it alone."""
    found, ended = new(size, options), None
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--sizes", size, "--json", str(answer)]
        command += ["--minutes", str(max(left, 0) / 60)]
        try:
            done = subprocess.run(command, stdout=sys.stderr, timeout=max(left, 0) + GRACE)
            if done.returncode:
                ended = f"it ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"it did not end within --minutes and {GRACE:.0f} seconds"
        if answer.exists():
            (found,) = json.loads(answer.read_text())["sizes"]
    if ended and not found["failed"]:
        found["failed"].append(f"{size}: {ended}")
    return found


def save(result: dict, target: str | None) -> None:
    """Store what is known so far, so that a time limit loses nothing."""
    if target not in (None, "-"):
        text = json.dumps(result, indent=1) + "\n"
        write_atomically(Path(target), lambda file: file.write(text.encode()))


def show(result: dict) -> None:
    """Print the tables."""
    print(heading(result, "torch"))
    print(f"transformers {result['transformers']}; {result['rounds']} rounds of "
          f"{result['steps']} steps; bf16; medians")
    for found in result["sizes"]:
        show_size(found)


if __name__ == "__main__":
    sys.exit(main())
