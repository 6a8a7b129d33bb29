"""ZeRO++ on an emulated cluster: step times, bytes on the wire beside the ledger's, and losses.

    python -m benchmarks.cluster.cluster [fsdp2 zero3 qwz hpz qgz zeropp zeropp-once] \\
        [--rate 200mbit --rate 1gbit --rate none] [--deepspeed] [--json FILE] [--plot FILE.png]

Every node is a network namespace of this machine, with a link of the given rate to the other nodes
(needs root, and the commands ip and tc). All configurations are built in the same processes and
take one step each in turn, so a busy machine slows all of them alike. Bytes are read from the
nodes' interfaces while every rank is idle, headers included, and shown beside the ranks' traffic
ledgers. M is the model in 16 bit, 2 bytes per parameter. Nothing else travels during a step:
gradients are not clipped, and losses are sent through pipes.

--one-host runs the same ranks without an emulated network, as any user, and shows only the ledgers'
bytes. The namespaces are removed when the benchmark ends, however it ends.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console

from benchmarks.cluster import emulation
from benchmarks.cluster.bf16_matmul import bf16_is_slow
from benchmarks.cluster.cluster_chart import draw
from benchmarks.cluster.cluster_report import show, summary
from benchmarks.cluster.configurations import DEEPSPEED, FSDP2, NAMES, OURS, axes_of
from benchmarks.cluster.deepspeed_peer import require_deepspeed
from benchmarks.cluster.interleaved_steps import measure_link, run_interleaved
from benchmarks.cluster.rank_processes import RankFailed
from benchmarks.cluster.started_cluster import exit_on_signals, started_cluster
from benchmarks.shared.charts import require_matplotlib
from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.result import begin, benchmark_parser, finish
from benchmarks.shared.training_setup import add_shape_flags, shape_of
from zeropp.errors import InputError

DEFAULT_NAMES = (FSDP2, "zero3", "zeropp")
OUR_NAMES = NAMES[:-1]  # all but DeepSpeed's
SHAPE = {"layers": 8, "hidden": 512, "heads": 8, "seq": 256, "vocab": 512, "micro_batches": 1}


def main() -> int:
    """Measure at each rate, print its tables, write the files asked for."""
    options = read_options()
    exit_on_signals()
    try:
        check(options)
        result = measure(options, Console(stderr=True))
    except InputError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    except (Disagreement, RankFailed) as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    finish(result, lambda result: show(result, Console()), options.json)
    if options.plot is not None:
        draw(result, options.plot)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add(
        "configurations",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(OUR_NAMES)} (default: {' '.join(DEFAULT_NAMES)}), or with sizes of "
        "axes in front, as in pp2-zero1, tp2-zeropp, cp2-zero3; the first is the reference; a name "
        "that is repeated is built again, which shows how much equal configurations differ",
    )
    add(
        "--rate",
        action="append",
        metavar="RATE",
        help="of each node's link, in each direction, as in 200mbit, or none; may be repeated "
        "(default: none)",
    )
    add("--nodes", type=int, default=2, metavar="N", help="default: 2")
    add("--ranks-per-node", type=int, default=2, metavar="N", help="default: 2")
    add("--rounds", type=int, default=10, metavar="N", help="timed steps of each (default: 10)")
    add("--warm-up", type=int, default=1, metavar="N", help="steps before them (default: 1)")
    add("--one-host", action="store_true", help="no namespaces: the ledger's bytes only")
    add("--deepspeed", action="store_true", help="add DeepSpeed's ZeRO-3, if it is installed")
    add(
        "--products",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="multiply bf16 matrices in this dtype; auto: in fp32 where that is faster, as on "
        "processors without bf16 arithmetic",
    )
    add("--plot", type=Path, metavar="FILE.png", help="draw a chart (needs matplotlib)")
    add_shape_flags(parser, **SHAPE)
    return parser.parse_args()  # fmt: skip


def check(options: argparse.Namespace) -> None:
    """Complete the options; raises InputError for what is impossible."""
    if options.plot is not None:
        require_matplotlib(options.plot)
    options.configurations = names_of(options)
    check_numbers(options)
    if options.one_host and options.rate:
        raise InputError("--rate sets the links between nodes, and --one-host has none")
    if options.one_host:
        options.rate = [None]
    else:
        options.rate = list(dict.fromkeys(options.rate or (emulation.UNLIMITED,)))
        for rate in options.rate:
            emulation.bits_per_second(rate)
        emulation.require_namespaces()
    if options.products == "auto":
        options.products = "fp32" if bf16_is_slow() else "bf16"


def names_of(options: argparse.Namespace) -> tuple[str, ...]:
    """The configurations asked for, the second of a name as `zeropp 2`.

    Raises InputError for an unknown name.
    """
    asked_for = options.configurations or DEFAULT_NAMES
    for name in asked_for:
        sizes, zero_name = axes_of(name)
        if zero_name not in (OURS if sizes else OUR_NAMES):
            hint = f"expected one of {', '.join(OUR_NAMES)}"
            if name == DEEPSPEED:
                hint = "--deepspeed adds it"
            raise InputError(f"no configuration is called {name!r}; {hint}")
    counts, names = Counter(), ()
    for name in asked_for:
        counts[name] += 1
        names += (name if counts[name] == 1 else f"{name} {counts[name]}",)
    if options.deepspeed:
        require_deepspeed()
        names += (DEEPSPEED,)
    return names


def check_numbers(options: argparse.Namespace) -> None:
    """Raise InputError for numbers that are too small."""
    minimums = {"nodes": 1 if options.one_host else 2}
    others = ("ranks_per_node", "rounds", "warm_up", "layers", "micro_batch", "micro_batches")
    minimums |= dict.fromkeys(others, 1)
    for name, minimum in minimums.items():
        if getattr(options, name) < minimum:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} {getattr(options, name)}: expected at least {minimum}")
    if options.nodes * options.ranks_per_node < 2:
        raise InputError("one rank sends nothing: give more --nodes or --ranks-per-node")


def measure(options: argparse.Namespace, console: Console) -> dict:
    """The whole result as JSON; shows progress on the console."""
    result = {
        **begin(__spec__.name),
        "nodes": options.nodes,
        "ranks_per_node": options.ranks_per_node,
        "shape": shape_of(options),
        "products": options.products,
        "rounds": options.rounds,
        "parameters": 0,
        "runs": [],
    }
    for rate in options.rate:
        run, parameters = measure_rate(options, rate, console)
        result["runs"].append(run)
        result["parameters"] = parameters
    return result


def measure_rate(
    options: argparse.Namespace, rate: str | None, console: Console
) -> tuple[dict, int]:
    """The result at one rate, and the number of parameters of the model."""
    title = "one host" if rate is None else f"rate {rate}"
    with (
        console.status(f"{title}: starting") as status,
        started_cluster(options.nodes, options.ranks_per_node, rate) as ranks,
    ):
        ranks.ask("join", products=options.products)
        link, processes = None, []
        if rate is not None:
            status.update(f"{title}: measuring the link")
            link = measure_link(ranks, rate, options.ranks_per_node)
            processes = ranks.pid_of_each_node(options.ranks_per_node)
        built = {}
        for name in options.configurations:
            status.update(f"{title}: building {name}")
            built[name] = ranks.ask("build", name=name, shape=shape_of(options))
        timed = run_interleaved(
            ranks,
            options.configurations,
            processes,
            rounds=options.rounds,
            warm_up=options.warm_up,
            say=lambda text: status.update(f"{title}: {text}"),
        )
        dropped = emulation.dropped() if rate is not None else None
    rows = summary(timed, built, options.ranks_per_node)
    parameters = built[options.configurations[-1]][0]["parameters"]
    return {"rate": rate, "link": link, "dropped": dropped, "rows": rows}, parameters


if __name__ == "__main__":
    sys.exit(main())
