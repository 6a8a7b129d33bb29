"""The optimizer on the host: a training step with it and without, and its update on several ranks.

    python benchmarks/step/offload.py [--parts train ranks] [--device cuda] [--json FILE]

train: the step of pretrain_gpt.py with fp32 weights and Adam on the device, on the host, and on the
host beside the next step. Losses and norms of the first must be those of the second to the last
digit; then all take a step in turn, round by round. On a GPU with the device's peak memory, and the
part of the copies' time in which a kernel ran.

ranks: the offloaded update (norm, clipping, Adam, bf16 weights) of one set of weights, sharded over
1, 2, ... ranks of this machine, which divide its cores. The bytes are the same in all; the time of
the slowest rank should be, too. The numbers of ranks take turns, started anew each time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.shared.result import add_json, begin, finish, heading  # noqa: E402
from benchmarks.shared.setting import Setting, add_flags, shape_of  # noqa: E402
from benchmarks.shared.stopwatch import quartiles  # noqa: E402
from benchmarks.step.copies import hidden_share  # noqa: E402
from benchmarks.step.duel import allocated, stopwatch  # noqa: E402
from benchmarks.step.loops import Loop, ours  # noqa: E402
from megatron_zpp.parallel.mesh import join_ranks  # noqa: E402
from megatron_zpp.settings.config import ParallelConfig  # noqa: E402
from zeropp import ZeroConfig, optimizer_step, shard  # noqa: E402
from zeropp.optim.offloaded import OffloadedAdam, offloaded_adamw  # noqa: E402
from zeropp.optim.step import local_part  # noqa: E402
from zeropp.ranks.topology import Environment  # noqa: E402

PARTS = ("train", "ranks")
MATRIX = 1024  # rows and columns of the weights of the part `ranks`
BYTES = 34  # of the update, for one parameter: gradients twice, 3 read and written, bf16 written
VERIFIED_STEPS = 3
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


def main() -> int:
    """Run the parts asked for and print their tables."""
    options = read_options()
    if options.on_ranks is not None:
        found, is_first = updates(options)
        if is_first:
            Path(options.on_ranks).write_text(json.dumps(found))
        return 0
    result = {
        **begin("offload"),
        "device": options.device,
        "shape": dict(shape_of(options)),
        "rounds": options.rounds,
        "train": train(options) if "train" in options.parts else [],
        "ranks": ranks_in_turn(options) if "ranks" in options.parts else [],
    }
    finish(result, show, options.json)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--device", choices=("cpu", "cuda"), help="of `train`; default: a GPU if there is one")
    add("--dtype", choices=("fp32", "bf16"), help="of `train`; default: bf16, on a CPU fp32")
    add("--rounds", type=int, default=10, help="timed steps of each (default: 10)")
    add("--turns", type=int, default=3, help="of each number of ranks (default: 3)")
    add("--ranks", type=int, nargs="+", default=(1, 2, 4), metavar="N",
        help="of the part ranks (default: 1 2 4)")  # fmt: skip
    add("--parameters", type=float, default=50.0, metavar="M", help="of it, millions (default: 50)")
    add_json(parser)
    add("--on-ranks", help=argparse.SUPPRESS)  # this process is a rank
    add_flags(parser, layers=4, hidden=512, heads=8)
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU; give --device cpu")
    options.dtype = options.dtype or ("bf16" if options.device == "cuda" else "fp32")
    return options


def train(options: argparse.Namespace) -> list[dict]:
    """Where the optimizer is, and what a step takes."""
    ranks = join_ranks(Environment.read(), ParallelConfig())
    with tempfile.TemporaryDirectory() as folder:
        late = Path(folder) / "late.json"
        zero = {"stage": 2, **OFFLOAD}
        beside = {"delayed_param_update": True, "delayed_param_update_warmup": VERIFIED_STEPS}
        late.write_text(json.dumps({"zero_optimization": zero, "zeropp": beside}))
        arms = {
            "on the device": "",
            "on the host": "--cpu-optimizer --use-pin-memory",
            "on the host, beside the next step": f"--deepspeed_config {late}",
        }
        settings = {
            name: Setting(shape=shape_of(options), ranks=ranks, dtype=options.dtype, stage=2,
                          more=more)
            for name, more in arms.items()
        }  # fmt: skip
        rows = in_turn(settings, options.rounds)
    dist.destroy_process_group()
    return rows


def in_turn(settings: dict[str, Setting], rounds: int) -> list[dict]:
    """A row for each: verified against the first, then one step each, again and again."""
    device = next(iter(settings.values())).ranks.device
    loops, held, before = {}, {}, allocated(device)
    for name, setting in settings.items():
        loops[name] = ours(setting)
        held[name] = allocated(device) - before
        before += held[name]
    histories = {n: [one.step()() for _ in range(VERIFIED_STEPS)] for n, one in loops.items()}
    for name, history in histories.items():
        if history != next(iter(histories.values())):
            sys.exit(f"error: losses and norms differ {name}: {histories}")
    for loop in loops.values():
        loop.step()()
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    peaks, clock = dict.fromkeys(loops, 0), stopwatch(device)
    for number in range(rounds):
        for name, loop in list(loops.items())[:: -1 if number % 2 else 1]:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            seconds[name].append(clock.lap(lambda loop=loop: loop.step()()))
            if device.type == "cuda":
                others = sum(held.values()) - held[name]
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated(device) - others)
    rows = [row(name, seconds, settings[name], peaks[name], loops[name]) for name in loops]
    for loop in loops.values():
        loop.close()
    return rows


def row(
    name: str, seconds: dict[str, list[float]], setting: Setting, peak: int, loop: Loop
) -> dict:
    """What was measured of one."""
    shape, own = dict(setting.shape), seconds[name]
    tokens = shape["seq"] * shape["micro-batch"] * shape["micro-batches"]
    first = next(iter(seconds.values()))
    ratios = [a / b for a, b in zip(own, first, strict=True)]
    return {
        "name": name, "seconds": own, "tokens_per_s": tokens / statistics.median(own),
        "ratio": statistics.median(ratios), "quartiles": quartiles(ratios),
        "peak_bytes": peak or None,
        "hidden_share": hidden_share(lambda: loop.step()()) if peak else None,
    }  # fmt: skip


def ranks_in_turn(options: argparse.Namespace) -> list[dict]:
    """A row for each number of ranks."""
    seconds: dict[int, list[float]] = {count: [] for count in options.ranks}
    for turn in range(options.turns):
        for count in list(options.ranks)[:: -1 if turn % 2 else 1]:
            seconds[count] += launch(count)
    num_bytes = BYTES * size_of(options) * MATRIX**2
    one = statistics.median(next(iter(seconds.values())))
    return [
        {"ranks": count, "threads": threads_of(count), "seconds": own,
         "gb_per_s": num_bytes / statistics.median(own) / 1e9,
         "ratio": statistics.median(own) / one, "quartiles": [q / one for q in quartiles(own)]}
        for count, own in seconds.items()
    ]  # fmt: skip


def launch(num_ranks: int) -> list[float]:
    """Run this script again on ranks of its own, and return what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        starter = [sys.executable, "-m", "zeropp.ranks.launcher", "--num_ranks", str(num_ranks)]
        command = [*starter, __file__, *sys.argv[1:], "--on-ranks", str(answer)]
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        status = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, env=hidden).returncode
        if status != 0:
            sys.exit(status)
        return json.loads(answer.read_text())


def threads_of(count: int) -> int:
    """Of each of `count` ranks, which divide the cores."""
    return max(1, len(os.sched_getaffinity(0)) // count)


def size_of(options: argparse.Namespace) -> int:
    """How many matrices make the parameters asked for."""
    return max(1, round(options.parameters * 1e6 / MATRIX**2))


def updates(options: argparse.Namespace) -> tuple[list[float], bool]:
    """On each rank: the slowest one's seconds, round by round; and whether this is the first."""
    ranks = join_ranks(Environment.read(), ParallelConfig())
    torch.set_num_threads(threads_of(ranks.num_ranks))
    config = ZeroConfig.from_json(
        {"zero_optimization": {"stage": 2, **OFFLOAD}, "bf16": {"enabled": True}}
    )
    matrices = (nn.Linear(MATRIX, MATRIX, bias=False) for _ in range(size_of(options)))
    sharding = shard(nn.Sequential(*matrices), ranks.mesh, config)
    groups = [{"params": list(sharding.model.parameters())}]
    optimizer = offloaded_adamw(sharding, groups, ranks.device, config)
    seconds = []
    for _ in range(options.rounds + 1):
        fill_gradients(optimizer)
        dist.barrier()
        start = time.perf_counter()
        optimizer_step(optimizer, sharding, clip_grad=1.0)
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds.append(slowest.item())
    dist.destroy_process_group()
    return seconds[1:], ranks.rank == 0  # the first makes the state


def fill_gradients(optimizer: OffloadedAdam) -> None:
    """As the end of a backward pass leaves them."""
    for parameter, master in optimizer.masters.items():
        optimizer.offload._take(parameter, torch.ones_like(local_part(master)))


def show(result: dict) -> None:
    """Print the tables."""
    print(heading(result, "torch"))
    if result["train"]:
        print("\none rank, " + ", ".join(f"{n} {value}" for n, value in result["shape"].items()))
        print(f"  {'fp32 weights and Adam':36} {'ms/step':>9} {'tokens/s':>9} {'time':>6}")
    for one in result["train"]:
        low, high = one["quartiles"]
        more = ""
        if one["peak_bytes"]:
            more = f"  peak {one['peak_bytes'] / 1e9:.2f} GB"
            more += f", {one['hidden_share']:.0%} of the copies hidden"
        print(f"  {one['name']:36} {1e3 * statistics.median(one['seconds']):9.1f} "
              f"{one['tokens_per_s']:9.0f} {one['ratio']:6.3f}, {low:.3f} to {high:.3f}{more}")
    if result["ranks"]:
        print("\nthe update, sharded over ranks of this machine, the slowest")
    for one in result["ranks"]:
        low, high = one["quartiles"]
        print(f"  {one['ranks']} ranks x {one['threads']} threads "
              f"{1e3 * statistics.median(one['seconds']):9.1f} ms {one['gb_per_s']:6.1f} GB/s, "
              f"time {one['ratio']:.3f}, {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    sys.exit(main())
