"""How long a training step takes beside plain PyTorch, and the memory of each ZeRO stage.

    python -m benchmarks.step.train_step [--parts one-rank many-ranks attach memory] [--json FILE]

Every comparison is verified before it is timed. All training loops run in the same processes, one
step each in turn. One rank, fp32: the step of pretrain_gpt.py against a plain loop over the same
layers. Several ranks, stage 3: against plain FSDP2 with the same dtypes on the wire. In two nodes,
with all of ZeRO++: `zeropp.attach` against `zeropp.shard`, and that against itself. Memory: bytes
per parameter at every stage, beside the formula of docs/memory.md.
"""

import argparse
import dataclasses
import json
import sys

import torch.distributed as dist

from benchmarks.memory.model_state import count_stages
from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.rank_launch import RanksFailed, run_on_ranks, write_answer
from benchmarks.shared.result import begin, benchmark_parser, finish, heading
from benchmarks.shared.training_setup import DTYPES, TrainingSetup, add_shape_flags, shape_of
from benchmarks.shared.zero_json import zero_json
from benchmarks.step.rank_comparison import (
    compare_attached,
    compare_on_many_ranks,
    compare_on_one_rank,
)
from megatron_zpp.parallel.mesh import join_ranks
from megatron_zpp.settings.config import ParallelConfig
from zeropp.ranks.topology import Environment

PARTS = ("one-rank", "many-ranks", "attach", "memory")


def main() -> int:
    """Run the parts asked for and print their tables."""
    options = read_options()
    if options.on_ranks is not None:
        answer = measure_on_rank(options)
        if answer["rank"] == 0:
            write_answer(options.on_ranks, answer)
        return 0
    result = {
        **begin(__spec__.name),
        "shape": shape_of(options),
        "rounds": options.rounds,
        "comparisons": [],
        "memory": [],
    }
    try:
        for count in rank_counts(options):
            if count == 1:
                answer = measure_on_rank(options)
            else:
                answer = run_on_ranks(__spec__.name, count, sys.argv[1:])
            result["comparisons"] += answer["comparisons"]
            result["memory"] += answer["memory"]
    except RanksFailed as failure:
        return failure.status
    finish(result, show, options.json)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--dtypes", nargs="+", choices=tuple(DTYPES), default=tuple(DTYPES))
    add("--ranks", type=int, default=4, help="for many-ranks and attach (default: 4)")
    add("--memory-ranks", type=int, nargs="+", default=(1, 2, 4), metavar="N",
        help="for the part memory (default: 1 2 4)")  # fmt: skip
    add("--rounds", type=int, default=12, help="timed steps of each loop (default: 12)")
    add("--on-ranks", help=argparse.SUPPRESS)  # set where this process is a rank
    add_shape_flags(parser)
    return parser.parse_args()


def rank_counts(options: argparse.Namespace) -> list[int]:
    """Every number of ranks that some part needs."""
    needed = {
        "one-rank": (1,),
        "many-ranks": (options.ranks,),
        "attach": (options.ranks,),
        "memory": tuple(options.memory_ranks),
    }
    return sorted({count for part in options.parts for count in needed[part]})


def measure_on_rank(options: argparse.Namespace) -> dict:
    """This rank's part of everything that needs as many ranks as there are."""
    ranks = join_ranks(Environment.read(), ParallelConfig())
    setup = TrainingSetup(shape=shape_of(options), ranks=ranks)
    answer = {"rank": ranks.rank, "comparisons": [], "memory": []}
    try:
        if "one-rank" in options.parts and ranks.num_ranks == 1:
            answer["comparisons"].append(compare_on_one_rank(setup, options.rounds))
        if "many-ranks" in options.parts and ranks.num_ranks == options.ranks:
            for dtype in options.dtypes:
                dtype_setup = dataclasses.replace(setup, dtype=dtype)
                comparison = compare_on_many_ranks(dtype_setup, options.rounds)
                answer["comparisons"].append(comparison)
        if "attach" in options.parts and ranks.num_ranks == options.ranks:
            text = json.dumps(zero_json("zeropp", ranks.num_ranks // 2), separators=(",", ":"))
            for dtype in options.dtypes:
                flags = f"--deepspeed-config {text}"
                nodes = dataclasses.replace(setup, dtype=dtype, extra_flags=flags)
                answer["comparisons"].append(compare_attached(nodes, options.rounds))
    except Disagreement as disagreement:
        sys.exit(f"error: {disagreement}" if ranks.rank == 0 else 1)
    if "memory" in options.parts and ranks.num_ranks in options.memory_ranks:
        for dtype in options.dtypes:
            answer["memory"] += count_stages(setup, dtype)
    dist.destroy_process_group()
    return answer


def show(result: dict) -> None:
    """Print the tables."""
    print(heading(result, "torch"))
    print("shape: " + ", ".join(f"{name} {value}" for name, value in result["shape"].items()))
    for comparison in result["comparisons"]:
        _show_comparison(comparison)
    if result["memory"]:
        print("\nbytes per parameter: weights, gradients, Adam's moments, between micro-batches")
        print("  ranks stage dtype  measured formula difference   paper")
    for row in result["memory"]:
        print(
            f"  {row['ranks']:5} {row['stage']:5} {row['dtype']:5} {row['measured']:9.2f} "
            f"{row['formula']:7.2f} {100 * row['difference']:+9.1f}% {row['paper']:7.2f}"
        )


def _show_comparison(comparison: dict) -> None:
    differences = comparison["verified"]["differences"].items()
    verified = ", ".join(f"{quantity} within {value:.1e}" for quantity, value in differences)
    print(
        f"\n{comparison['name']} ({comparison['ranks']} x {comparison['threads']} threads, "
        f"{comparison['device']}); verified: {verified}"
    )
    print(f"  {'':28} {'median ms':>10} {'ratio':>7}   {'its quartiles':16} processor time")
    for loop in comparison["loops"]:
        low, high = loop["quartiles"]
        print(
            f"  {loop['name']:28} {1e3 * loop['median']:10.1f} {loop['ratio']:7.3f}   "
            f"{low:.3f} to {high:.3f}   {loop['processor_ratio']:8.3f}"
        )


if __name__ == "__main__":
    sys.exit(main())
