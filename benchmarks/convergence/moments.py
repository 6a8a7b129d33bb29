"""What moments in bf16 change in a training: the same runs with moments in fp32 and in bf16.

    python benchmarks/convergence/moments.py [--steps N] [--seeds N] [--json FILE] [-- FLAG ...]

A small GPT on the default text, with the FLAGs of pretrain_gpt.py after `--` added, one rank. Runs
of one seed have the same weights at the start and the same batches. The held-out loss is that of
the validation split after the last step; the training loss is the mean of the last tenth of steps.
"""

import argparse
import dataclasses
import io
import statistics
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.shared.result import add_json, begin, finish, heading  # noqa: E402
from megatron_zpp.data.loader import Loader  # noqa: E402
from megatron_zpp.monitor.console import Console  # noqa: E402
from megatron_zpp.parallel.mesh import Ranks, join_ranks  # noqa: E402
from megatron_zpp.settings.arguments import parse  # noqa: E402
from megatron_zpp.settings.config import Config  # noqa: E402
from megatron_zpp.train.build import build_run  # noqa: E402
from megatron_zpp.train.evaluate import evaluate  # noqa: E402
from megatron_zpp.train.loop import TRAIN, VALIDATION, loader  # noqa: E402
from megatron_zpp.train.run import Run  # noqa: E402
from megatron_zpp.train.step import train_step  # noqa: E402
from megatron_zpp.train.stop import Stopping  # noqa: E402
from zeropp.optim import CPUAdam  # noqa: E402
from zeropp.ranks.topology import Environment  # noqa: E402

MOMENTS = ("fp32", "bf16")
HELD_OUT = 32  # batches
MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 8 --lr 2e-3 --lr-warmup-iters 20 "
    "--log-interval 1000000 --eval-iters 0"
)


def main() -> int:
    """Train, print a table."""
    options, flags = read_options()
    result = begin("moments") | {"steps": options.steps, "runs": []}
    ranks = None
    for seed in range(1, options.seeds + 1):
        line = [*MODEL.split(), "--train-iters", str(options.steps), "--seed", str(seed), *flags]
        config = parse(line, 1)
        ranks = ranks or join_ranks(Environment.read(), config.parallel)
        for kind in MOMENTS:
            result["runs"].append({"seed": seed, "moments": kind, **trained(config, ranks, kind)})
    torch.distributed.destroy_process_group()
    finish(result, show, options.json)
    return 0


def read_options() -> tuple[argparse.Namespace, list[str]]:
    """The command line, and the flags of pretrain_gpt.py after `--`."""
    own, _, flags = " ".join(sys.argv[1:]).partition("-- ")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, help="of each run (default: 400)")
    parser.add_argument("--seeds", type=int, default=4, help="pairs of runs (default: 4)")
    add_json(parser)
    return parser.parse_args(own.split()), flags.split()


def trained(config: Config, ranks: Ranks, kind: str) -> dict:
    """One run: the loss of every step, and the held-out loss after the last."""
    console = Console(0, io.StringIO(), interactive=False)
    run = build_run(config, ranks, console, Stopping(config.training))
    groups = [{**group} for group in run.optimizer.param_groups]
    settings = {name: groups[0][name] for name in ("lr", "betas", "eps", "weight_decay")}
    optimizer = CPUAdam(groups, **settings, fp32_optimizer_states=kind == "fp32")
    run = dataclasses.replace(run, optimizer=optimizer)
    batches = loader(run, TRAIN, 0)
    steps = range(config.training.train_iters)
    losses = [train_step(run, batches).result().loss for _ in steps]
    batches.close()
    return {
        "parameters": run.sharding.model.num_parameters(), "losses": losses,
        "held_out": held_out(run),
    }  # fmt: skip


def held_out(run: Run) -> float:
    """Mean loss in nats per token."""
    batches = Loader(
        run.datasets[VALIDATION], run.config.data, consumed_samples=0,
        micro_batch_size=run.config.batch.micro_batch_size, rank=0, world=1, eod=run.tokenizer.eod,
    )  # fmt: skip
    loss = evaluate(run.sharding, run.ranks, batches, HELD_OUT)
    batches.close()
    return loss


def show(result: dict) -> None:
    """Print the table."""
    print(heading(result, "torch"))
    runs = result["runs"]
    last = max(1, result["steps"] // 10)
    print(f"{runs[0]['parameters'] / 1e6:.2f} M parameters, {result['steps']} steps\n")
    print("  seed   held-out: fp32     bf16   difference   training: fp32     bf16   difference")
    apart = []
    for wide, narrow in zip(runs[::2], runs[1::2], strict=True):
        ends = [statistics.fmean(one["losses"][-last:]) for one in (wide, narrow)]
        held = [one["held_out"] for one in (wide, narrow)]
        apart.append(held[1] - held[0])
        print(f"  {wide['seed']:4} {held[0]:16.4f} {held[1]:8.4f} {apart[-1]:+12.4f} "
              f"{ends[0]:16.4f} {ends[1]:8.4f} {ends[1] - ends[0]:+12.4f}")  # fmt: skip
    seeds = [one["held_out"] for one in runs[::2]]
    if len(seeds) > 1:
        print(f"\n  mean held-out difference {statistics.fmean(apart):+.4f}, its standard error "
              f"{statistics.stdev(apart) / len(apart) ** 0.5:.4f}; between seeds the loss has a "
              f"standard deviation of {statistics.stdev(seeds):.4f}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
