"""LoRA on an emulated cluster: what crosses nodes while frozen weights are stored as INT8, or not.

    python benchmarks/cluster/mixz.py [--rate 1gbit] [--steps 4] [--tokens 6] [--json FILE]

| name         | frozen weights                                                       |
|--------------|----------------------------------------------------------------------|
| `lora-zero3` | bf16 shards of fp32 numbers, gathered for each use                   |
| `mixz`       | stored as INT8, gathered as stored                                   |
| `mixz-hpz`   | the same, with hpZ's copy in each node                               |

All are built in the same processes. First losses must agree within what INT8 may change. Then each
takes steps in turn, and afterwards passes without gradients, one for each token of a text, as
generation without a cache makes. Bytes are those of the nodes' interfaces, headers included, read
while every rank stands still. M is the model in 16 bit. Needs root, and the commands ip and tc.
"""

import argparse
import signal
import statistics
import sys
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.cluster.cluster import (  # noqa: E402
    ENDING,
    Plan,
    _end,
    emulation,  # noqa: E402
    started,
)
from benchmarks.cluster.crew import Crew, RankFailed, Refused  # noqa: E402
from benchmarks.cluster.products import bf16_is_slow  # noqa: E402
from benchmarks.cluster.trainees import LORA  # noqa: E402
from benchmarks.shared.result import add_json, begin, finish, heading  # noqa: E402
from benchmarks.shared.setting import add_flags, shape_of  # noqa: E402
from zeropp.errors import InputError  # noqa: E402

SHAPE = {"layers": 8, "hidden": 512, "heads": 8, "seq": 128, "vocab": 512, "micro_batches": 1}
APART = 0.005  # of a loss: what INT8 may change it by


def main() -> int:
    """Measure, and print the table."""
    options = read_options()
    for one in ENDING:
        signal.signal(one, _end)
    result = {**begin("mixz"), "shape": dict(shape_of(options)), "rate": options.rate}
    try:
        require_two(options)
        emulation.bits_per_second(options.rate)
        emulation.require_means()
        result["rows"] = measure(options)
    except (InputError, Refused, RankFailed) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    finish(result, show, options.json)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rate", default=emulation.UNLIMITED, help="of each node's link (default: none)")
    add("--steps", type=int, default=4, metavar="N", help="of each, the first apart (default: 4)")
    add("--tokens", type=int, default=6, metavar="N", help="passes of a text (default: 6)")
    add_json(parser)
    add_flags(parser, **SHAPE)
    return parser.parse_args()


def require_two(options: argparse.Namespace) -> None:
    """Raise InputError for fewer steps or tokens than the first and one of those after it."""
    for name in ("steps", "tokens"):
        if getattr(options, name) < 2:
            raise InputError(f"--{name} {getattr(options, name)}: the first is shown apart: give 2")


def measure(options: argparse.Namespace) -> list[dict]:
    """A row for each: bytes that the first node sent, in multiples of M, and seconds."""
    plan = Plan(
        names=tuple(LORA), rates=(options.rate,), nodes=2, ranks_per_node=2,
        shape=shape_of(options), rounds=options.steps, warm_up=0,
        products="fp32" if bf16_is_slow() else "bf16",
    )  # fmt: skip
    say = Console(stderr=True)
    with started(plan, options.rate) as (crew, _):
        crew.ask("join", products=plan.products)
        built = {}
        for name in plan.names:
            say.print(f"building {name}")
            built[name] = crew.ask("build", name=name, shape=plan.shape)[0]
        steps = {name: [] for name in plan.names}
        for number in range(options.steps):
            for name in plan.names[:: -1 if number % 2 else 1]:
                steps[name].append(watched(crew, "step", name))
        tokens = {name: [watched(crew, "look", name) for _ in range(options.tokens)]
                  for name in plan.names}
    require_agreement(steps)
    return [row(name, built[name], steps[name], tokens[name]) for name in plan.names]


def watched(crew: Crew, what: str, name: str) -> dict:
    """One order: the slowest rank's seconds, the mean loss, the bytes that the first node sent."""
    process = crew.processes(2)[0]
    before = emulation.counters(process)[emulation.INTERFACE]
    answers = crew.ask(what, name=name)
    after = emulation.counters(process)[emulation.INTERFACE]
    return {
        "sent": (after - before).sent,
        "seconds": max(one["seconds"] for one in answers),
        "loss": statistics.fmean(one["loss"] for one in answers),
    }


def require_agreement(steps: dict[str, list[dict]]) -> None:
    """Raise Refused unless all begin with the loss of the first."""
    losses = {name: found[0]["loss"] for name, found in steps.items()}
    first = next(iter(losses.values()))
    if any(abs(loss - first) > APART * first for loss in losses.values()):
        raise Refused(f"the first losses differ, so different models are trained: {losses}")


def row(name: str, built: dict, steps: list[dict], tokens: list[dict]) -> dict:
    """What was measured of one."""
    later = steps[1:]
    return {
        "name": name,
        "parameters": built["parameters"],
        "held_bytes": built["held"],
        "first_step": steps[0]["sent"],
        "later_step": statistics.fmean(one["sent"] for one in later),
        "first_token": tokens[0]["sent"],
        "later_token": statistics.fmean(one["sent"] for one in tokens[1:]),
        "step_seconds": statistics.median(one["seconds"] for one in later),
        "token_seconds": statistics.median(one["seconds"] for one in tokens[1:]),
        "losses": [one["loss"] for one in steps],
    }


def show(result: dict) -> None:
    """Print the table."""
    rows, shape = result["rows"], result["shape"]
    size = 2 * rows[0]["parameters"]
    print(heading(result, "torch"))
    words = ", ".join(f"{name} {value}" for name, value in shape.items())
    print(f"2 nodes x 2 ranks, rate {result['rate']}; {rows[0]['parameters'] / 1e6:.1f} M "
          f"parameters, M = {size / 1e6:.1f} MB; {words}")
    print("\n  sent by a node, in multiples of M      seconds            a rank's frozen matrices")
    print("               first step  later steps  first token  later tokens   step  token  MB")
    for one in rows:
        parts = [one[key] / size for key in
                 ("first_step", "later_step", "first_token", "later_token")]
        print(f"  {one['name']:12}" + "".join(f"{part:11.4f}  " for part in parts)
              + f"{one['step_seconds']:7.3f} {one['token_seconds']:6.3f} "
              f"{one['held_bytes'] / 1e6:6.2f}")
    print("\n  first losses: " + ", ".join(f"{one['name']} {one['losses'][0]:.4f}" for one in rows))


if __name__ == "__main__":
    sys.exit(main())
