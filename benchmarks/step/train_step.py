"""How long a training step takes beside plain PyTorch, and how much memory each ZeRO stage holds.

    python benchmarks/step/train_step.py [--parts one-rank many-ranks memory] [--json FILE]

Every comparison is verified before it is timed, and all contestants run in the same processes, one
step each in turn. One rank, fp32: the step of pretrain_gpt.py against a bare loop over the same
layers. Several ranks, stage 3: against plain FSDP2 with the same dtypes on the wire. Memory: bytes
per parameter at every stage, beside the formula of docs/memory.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.memory.model_state import count_stages  # noqa: E402
from benchmarks.shared.result import add_json, begin, finish, heading  # noqa: E402
from benchmarks.shared.setting import DTYPES, Setting, add_flags, shape_of  # noqa: E402
from benchmarks.step.contest import Disagreement, many_ranks, one_rank  # noqa: E402
from megatron_zpp.parallel.mesh import join_ranks  # noqa: E402
from megatron_zpp.settings.config import ParallelConfig  # noqa: E402
from zeropp.ranks.topology import Environment  # noqa: E402

PARTS = ("one-rank", "many-ranks", "memory")


def main() -> int:
    """Run the parts asked for and print their tables."""
    options = read_options()
    if options.on_ranks is not None:
        found = work_on_rank(options)
        if found["rank"] == 0:
            Path(options.on_ranks).write_text(json.dumps(found))
        return 0
    result = {
        **begin("train_step"),
        "shape": dict(shape_of(options)),
        "rounds": options.rounds,
        "contests": [],
        "memory": [],
    }
    for count in rank_counts(options):
        found = work_on_rank(options) if count == 1 else launch(count)
        result["contests"] += found["contests"]
        result["memory"] += found["memory"]
    finish(result, show, options.json)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=tuple(DTYPES))
    parser.add_argument("--ranks", type=int, default=4, help="of the part many-ranks (default: 4)")
    parser.add_argument(
        "--memory-ranks", type=int, nargs="+", default=(1, 2, 4), metavar="N",
        help="of the part memory (default: 1 2 4)",
    )
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each (default: 12)")
    add_json(parser)
    parser.add_argument("--on-ranks", help=argparse.SUPPRESS)  # this process is a rank
    add_flags(parser)
    return parser.parse_args()


def rank_counts(options: argparse.Namespace) -> list[int]:
    """Every number of ranks that some part needs."""
    needed = {
        "one-rank": (1,), "many-ranks": (options.ranks,), "memory": tuple(options.memory_ranks),
    }
    return sorted({count for part in options.parts for count in needed[part]})


def launch(num_ranks: int) -> dict:
    """Run this script again on ranks of its own, and return what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        starter = [sys.executable, "-m", "zeropp.ranks.launcher", "--num_ranks", str(num_ranks)]
        command = [*starter, __file__, *sys.argv[1:], "--on-ranks", str(answer)]
        status = subprocess.run(command, cwd=ROOT, stdout=sys.stderr).returncode
        if status != 0:
            sys.exit(status)
        return json.loads(answer.read_text())


def work_on_rank(options: argparse.Namespace) -> dict:
    """This rank's part of everything that needs as many ranks as there are."""
    ranks = join_ranks(Environment.read(), ParallelConfig())
    setting = Setting(shape=shape_of(options), ranks=ranks)
    found = {"rank": ranks.rank, "contests": [], "memory": []}
    try:
        if "one-rank" in options.parts and ranks.num_ranks == 1:
            found["contests"].append(one_rank(setting, options.rounds))
        if "many-ranks" in options.parts and ranks.num_ranks == options.ranks:
            for dtype in options.dtypes:
                each = setting.of(dtype=dtype, stage=3)
                found["contests"].append(many_ranks(each, options.rounds))
    except Disagreement as disagreement:
        sys.exit(f"error: {disagreement}" if ranks.rank == 0 else 1)
    if "memory" in options.parts and ranks.num_ranks in options.memory_ranks:
        for dtype in options.dtypes:
            found["memory"] += count_stages(setting, dtype)
    dist.destroy_process_group()
    return found


def show(result: dict) -> None:
    """Print the tables."""
    print(heading(result, "torch"))
    print("shape: " + ", ".join(f"{name} {value}" for name, value in result["shape"].items()))
    for contest in result["contests"]:
        worst = contest["verified"]["differences"]
        print(f"\n{contest['name']} ({contest['ranks']} x {contest['threads']} threads, "
              f"{contest['device']}); verified: " +
              ", ".join(f"{what} within {value:.1e}" for what, value in worst.items()))
        print(f"  {'':28} {'median ms':>10} {'ratio':>7}   {'its quartiles':16} processor time")
        for one in contest["contestants"]:
            low, high = one["quartiles"]
            print(f"  {one['name']:28} {1e3 * one['median']:10.1f} {one['ratio']:7.3f}   "
                  f"{low:.3f} to {high:.3f}   {one['work_ratio']:8.3f}")
    if result["memory"]:
        print("\nbytes per parameter: weights, gradients, Adam's moments, between micro-batches")
        print("  ranks stage dtype  measured formula difference   paper")
    for row in result["memory"]:
        print(f"  {row['ranks']:5} {row['stage']:5} {row['dtype']:5} {row['measured']:9.2f} "
              f"{row['formula']:7.2f} {100 * row['difference']:+9.1f}% {row['paper']:7.2f}")


if __name__ == "__main__":
    sys.exit(main())
