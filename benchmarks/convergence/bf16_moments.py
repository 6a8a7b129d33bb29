"""What Adam's moments in bf16 change in training: the same runs with moments in fp32 and in bf16.

    python -m benchmarks.convergence.bf16_moments [--steps N] [--seeds N] [--json FILE]
        [-- FLAG ...]

A small GPT is trained on the default text on one rank, with the FLAGs of pretrain_gpt.py after `--`
added. Runs of one seed have the same initial weights and the same batches. The held-out loss is
that of the validation split after the last step. The training loss is the mean of the last tenth of
the steps.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Mapping

import torch

from benchmarks.shared.pretrain_run import held_out_loss, run_step, silent_run, training_batches
from benchmarks.shared.result import begin, benchmark_parser, finish, heading
from megatron_zpp.parallel.mesh import Ranks, join_ranks
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import Config
from zeropp.optim import CPUAdam
from zeropp.ranks.topology import Environment

MOMENTS = ("fp32", "bf16")
HELD_OUT_BATCHES = 32
MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 8 --lr 2e-3 --lr-warmup-iters 20 "
    "--log-interval 1000000 --eval-iters 0"
)


def main() -> int:
    """Train and print a table."""
    options = read_options()
    result = begin(__spec__.name) | {"steps": options.steps, "runs": []}
    ranks = None
    for seed in range(1, options.seeds + 1):
        words = [*MODEL.split(), "--train-iters", str(options.steps), "--seed", str(seed)]
        config = parse([*words, *options.flags], 1)
        ranks = ranks or join_ranks(Environment.read(), config.parallel)
        for moments in MOMENTS:
            run = {"seed": seed, "moments": moments, **train(config, ranks, moments)}
            result["runs"].append(run)
    torch.distributed.destroy_process_group()
    finish(result, show, options.json)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of each run (default: 400)")
    parser.add_argument("--seeds", type=int, default=4, help="pairs of runs (default: 4)")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="of pretrain_gpt.py")
    return parser.parse_args()


def train(config: Config, ranks: Ranks, moments: str) -> dict:
    """One run: the loss of every step, and the held-out loss after the last."""
    run = silent_run(config, ranks)
    groups = [{**group} for group in run.optimizer.param_groups]
    settings = {name: groups[0][name] for name in ("lr", "betas", "eps", "weight_decay")}
    optimizer = CPUAdam(groups, **settings, fp32_optimizer_states=moments == "fp32")
    run = dataclasses.replace(run, optimizer=optimizer)
    with training_batches(run) as batches:
        losses = [run_step(run, batches).loss for _ in range(config.training.train_iters)]
    return {
        "parameters": run.sharding.model.num_parameters(),
        "losses": losses,
        "held_out": held_out_loss(run, config.batch.micro_batch_size, HELD_OUT_BATCHES),
    }


def show(result: dict) -> None:
    """Print the table."""
    print(heading(result, "torch"))
    runs = result["runs"]
    print(f"{runs[0]['parameters'] / 1e6:.2f} M parameters, {result['steps']} steps\n")
    print("  seed   held-out: fp32     bf16   difference   training: fp32     bf16   difference")
    held_out_differences = []
    for fp32, bf16 in zip(runs[::2], runs[1::2], strict=True):
        training = [final_training_loss(run) for run in (fp32, bf16)]
        held_out = [run["held_out"] for run in (fp32, bf16)]
        held_out_differences.append(held_out[1] - held_out[0])
        print(
            f"  {fp32['seed']:4} {held_out[0]:16.4f} {held_out[1]:8.4f} "
            f"{held_out_differences[-1]:+12.4f} "
            f"{training[0]:16.4f} {training[1]:8.4f} {training[1] - training[0]:+12.4f}"
        )
    fp32_losses = [run["held_out"] for run in runs[::2]]
    if len(fp32_losses) > 1:
        error = statistics.stdev(held_out_differences) / len(fp32_losses) ** 0.5
        print(
            f"\n  mean held-out difference {statistics.fmean(held_out_differences):+.4f}, its "
            f"standard error {error:.4f}; between seeds the loss has a standard deviation of "
            f"{statistics.stdev(fp32_losses):.4f}"
        )


def final_training_loss(run: Mapping) -> float:
    """The mean training loss of the last tenth of the steps."""
    count = max(1, len(run["losses"]) // 10)
    return statistics.fmean(run["losses"][-count:])


if __name__ == "__main__":
    sys.exit(main())
