"""LoRA on an emulated cluster: what crosses nodes with and without frozen weights in INT8.

    python -m benchmarks.cluster.mixz [--rate 1gbit] [--steps 4] [--tokens 6] [--json FILE]

| name         | frozen weights                                      |
|--------------|-----------------------------------------------------|
| `lora-zero3` | bf16 shards of fp32 numbers, gathered for each use  |
| `mixz`       | stored as INT8, gathered as stored                  |
| `mixz-hpz`   | the same, with hpZ's secondary copy in each node    |

All configurations are built in the same processes. Their first losses must agree within what INT8
may change. Each takes steps in turn, and then passes without gradients, one for each token of a
text, as generation without a cache does. Bytes are read from the nodes' interfaces while every rank
is idle, headers included. M is the model in 16 bit. Needs root, and the commands ip and tc.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.cluster import emulation
from benchmarks.cluster.bf16_matmul import bf16_is_slow
from benchmarks.cluster.configurations import LORA
from benchmarks.cluster.interleaved_steps import TimedStep, require_equal_losses, timed_run
from benchmarks.cluster.rank_processes import RankFailed
from benchmarks.cluster.started_cluster import exit_on_signals, started_cluster
from benchmarks.shared.interleaved import Disagreement, interleaved
from benchmarks.shared.result import begin, benchmark_parser, finish, heading
from benchmarks.shared.training_setup import add_shape_flags, shape_of
from zeropp.errors import InputError

SHAPE = {"layers": 8, "hidden": 512, "heads": 8, "seq": 128, "vocab": 512, "micro_batches": 1}
NODES, RANKS_PER_NODE = 2, 2
LOSS_TOLERANCE = 0.005  # relative: what INT8 may change in a loss


def main() -> int:
    """Measure, and print the table."""
    options = read_options()
    exit_on_signals()
    result = {**begin(__spec__.name), "shape": shape_of(options), "rate": options.rate}
    try:
        require_two(options)
        emulation.bits_per_second(options.rate)
        emulation.require_namespaces()
        result["rows"] = measure(options)
    except (InputError, RankFailed, Disagreement) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    finish(result, show, options.json)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--rate", default=emulation.UNLIMITED, help="of each node's link (default: none)")
    add("--steps", type=int, default=4, metavar="N", help="training steps of each (default: 4)")
    add("--tokens", type=int, default=6, metavar="N", help="passes of a text (default: 6)")
    add_shape_flags(parser, **SHAPE)
    return parser.parse_args()


def require_two(options: argparse.Namespace) -> None:
    """Raise InputError for fewer than two steps or tokens."""
    for name in ("steps", "tokens"):
        count = getattr(options, name)
        if count < 2:
            raise InputError(
                f"--{name} {count}: expected at least 2, as the first is reported separately"
            )


def measure(options: argparse.Namespace) -> list[dict]:
    """A row for each configuration: bytes that the first node sent, and seconds."""
    progress, names, shape = Console(stderr=True), tuple(LORA), shape_of(options)
    with started_cluster(NODES, RANKS_PER_NODE, options.rate) as ranks:
        ranks.ask("join", products="fp32" if bf16_is_slow() else "bf16")
        built = {}
        for name in names:
            progress.print(f"building {name}")
            built[name] = ranks.ask("build", name=name, shape=shape)[0]
        first_node = ranks.pid_of_each_node(RANKS_PER_NODE)[:1]
        steps: dict[str, list[TimedStep]] = {name: [] for name in names}
        for name in interleaved(names, options.steps):
            steps[name].append(timed_run(ranks, name, "step", first_node))
        tokens = {
            name: [timed_run(ranks, name, "forward", first_node) for _ in range(options.tokens)]
            for name in names
        }
    require_equal_losses({name: steps[name][0].loss for name in names}, LOSS_TOLERANCE)
    return [row(name, built[name], steps[name], tokens[name]) for name in names]


def row(name: str, built: dict, steps: Sequence[TimedStep], tokens: Sequence[TimedStep]) -> dict:
    """The numbers of one configuration; `built` is the first rank's answer to `build`."""
    return {
        "name": name,
        "parameters": built["parameters"],
        "held_bytes": built["held"],
        "first_step": sent(steps[0]),
        "later_step": statistics.fmean(sent(step) for step in steps[1:]),
        "first_token": sent(tokens[0]),
        "later_token": statistics.fmean(sent(token) for token in tokens[1:]),
        "step_seconds": statistics.median(step.seconds for step in steps[1:]),
        "token_seconds": statistics.median(token.seconds for token in tokens[1:]),
        "losses": [step.loss for step in steps],
    }


def sent(step: TimedStep) -> int:
    """Bytes that the first node sent to other nodes."""
    return step.wire[0][emulation.INTERFACE].sent


def show(result: dict) -> None:
    """Print the table."""
    rows = result["rows"]
    model_bytes = 2 * rows[0]["parameters"]
    shape = ", ".join(f"{name} {value}" for name, value in result["shape"].items())
    print(heading(result, "torch"))
    print(
        f"{NODES} nodes x {RANKS_PER_NODE} ranks, rate {result['rate']}; "
        f"{rows[0]['parameters'] / 1e6:.1f} M parameters, M = {model_bytes / 1e6:.1f} MB; {shape}"
    )
    print("\n  sent by a node, in multiples of M      seconds            a rank's frozen matrices")
    print("               first step  later steps  first token  later tokens   step  token  MB")
    for each in rows:
        keys = ("first_step", "later_step", "first_token", "later_token")
        cells = "".join(f"{each[key] / model_bytes:11.4f}  " for key in keys)
        print(
            f"  {each['name']:12}{cells}{each['step_seconds']:7.3f} {each['token_seconds']:6.3f} "
            f"{each['held_bytes'] / 1e6:6.2f}"
        )
    losses = ", ".join(f"{each['name']} {each['losses'][0]:.4f}" for each in rows)
    print(f"\n  first losses: {losses}")


if __name__ == "__main__":
    sys.exit(main())
