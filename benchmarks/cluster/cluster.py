"""ZeRO++ on an emulated cluster: step time, bytes on the wire beside the ledger's, loss.

    python benchmarks/cluster/cluster.py [fsdp2 zero3 qwz hpz qgz zeropp zeropp-4-4] \\
        [--rate 200mbit --rate 1gbit --rate none] [--deepspeed] [--json FILE] [--plot FILE.png]

Every node is a network namespace of this machine, with a link of the given rate to the others
(root, and the commands ip and tc). Every configuration is built in the same processes, and they
take one step each in turn, round after round, so that a busy machine slows all of them. Bytes are
those of the nodes' interfaces, headers included, read while every rank stands still; beside them
stands what the ranks' ledgers say. M is the model in 16 bit: 2 bytes for each parameter. Nothing
else travels during a step: gradients are not clipped, losses go another way.

--one-host runs the same ranks without a network of their own, as any user, and shows the ledger's
bytes only. What a run made is removed when it ends, however it ends.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.cluster import emulation  # noqa: E402
from benchmarks.cluster.cluster_chart import draw  # noqa: E402
from benchmarks.cluster.cluster_report import show, summary  # noqa: E402
from benchmarks.cluster.crew import Crew, Host, RankFailed, Refused, started_crew  # noqa: E402
from benchmarks.cluster.deepspeed_peer import require_deepspeed  # noqa: E402
from benchmarks.cluster.products import bf16_is_slow  # noqa: E402
from benchmarks.cluster.trainees import DEEPSPEED, FSDP2, NAMES  # noqa: E402
from benchmarks.cluster.turns import Disagreement, measure_link, take_turns  # noqa: E402
from benchmarks.convergence.curves import require_drawing  # noqa: E402
from benchmarks.shared.setting import add_flags, shape_of  # noqa: E402
from benchmarks.shared.surroundings import surroundings  # noqa: E402
from zeropp.atomic import write_atomically  # noqa: E402
from zeropp.errors import InputError  # noqa: E402

USUAL = (FSDP2, "zero3", "zeropp")
SHAPE = {"layers": 8, "hidden": 512, "heads": 8, "seq": 256, "vocab": 512, "micro_batches": 1}
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PORT = 29500  # where a namespace has its ports for itself


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured: `rates` is (None,) on one host."""

    names: tuple[str, ...]
    rates: tuple[str | None, ...]
    nodes: int
    ranks_per_node: int
    shape: tuple[tuple[str, int], ...]
    rounds: int
    warm_up: int
    products: str  # what bf16 matrices are multiplied in


def main() -> int:
    """Measure at each rate, print a table for it, write the files asked for."""
    options = read_options()
    for one in ENDING:
        signal.signal(one, _end)
    try:
        plan = plan_of(options)
        result = measure(plan, Console(stderr=True))
    except (InputError, Refused) as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    except (Disagreement, RankFailed) as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    if options.json == "-":
        print(json.dumps(result, indent=1))
    else:
        show(result, Console())
    if options.json not in (None, "-"):
        text = json.dumps(result, indent=1) + "\n"
        write_atomically(Path(options.json), lambda file: file.write(text.encode()))
    if options.plot is not None:
        draw(result, options.plot)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("configurations", nargs="*", metavar="NAME",
        help=f"of {', '.join(NAMES[:-1])} (default: {' '.join(USUAL)}); others compare with the "
             "first")
    add("--rate", action="append", metavar="RATE",
        help="of each node's link, in each direction, as in 200mbit, or none; may be given several "
             "times (default: none)")
    add("--nodes", type=int, default=2, metavar="N", help="nodes (default: 2)")
    add("--ranks-per-node", type=int, default=2, metavar="N", help="ranks of a node (default: 2)")
    add("--rounds", type=int, default=10, metavar="N", help="timed steps of each (default: 10)")
    add("--warm-up", type=int, default=1, metavar="N", help="steps before them (default: 1)")
    add("--one-host", action="store_true", help="no namespaces: the ledger's bytes only")
    add("--deepspeed", action="store_true", help="add DeepSpeed's ZeRO-3, if it is installed")
    add("--products", choices=("auto", "bf16", "fp32"), default="auto",
        help="multiply bf16 matrices in this format; auto: in fp32 where that is faster, as on "
             "processors without bf16 arithmetic")
    add("--json", metavar="FILE", help="write the result here; - prints only it")
    add("--plot", type=Path, metavar="FILE.png", help="draw the result here (needs matplotlib)")
    add_flags(parser, **SHAPE)
    return parser.parse_args()


def plan_of(options: argparse.Namespace) -> Plan:
    """What the command line asks for; raises InputError for what cannot be."""
    if options.plot is not None:
        require_drawing(options.plot)
    names = tuple(dict.fromkeys(options.configurations or USUAL))
    for name in names:
        if name not in NAMES[:-1]:
            hint = "--deepspeed adds it" if name == DEEPSPEED else f"known: {', '.join(NAMES[:-1])}"
            raise InputError(f"no configuration is called {name!r}; {hint}")
    if options.deepspeed:
        require_deepspeed()
        names += (DEEPSPEED,)
    fewest = {"nodes": 1 if options.one_host else 2, "ranks_per_node": 1, "rounds": 1, "warm_up": 1}
    fewest |= dict.fromkeys(("layers", "micro_batch", "micro_batches"), 1)
    for name, least in fewest.items():
        if getattr(options, name) < least:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} {getattr(options, name)}: expected at least {least}")
    if options.nodes * options.ranks_per_node < 2:
        raise InputError("one rank sends nothing to anybody: give more --nodes or --ranks-per-node")
    if options.one_host and options.rate:
        raise InputError("--rate is that of links between nodes, and --one-host has none")
    rates = tuple(dict.fromkeys(options.rate or (emulation.UNLIMITED,)))
    if not options.one_host:
        for rate in rates:
            emulation.bits_per_second(rate)
        emulation.require_means()
    products = options.products
    if products == "auto":
        products = "fp32" if bf16_is_slow() else "bf16"
    return Plan(
        names=names,
        rates=(None,) if options.one_host else rates,
        nodes=options.nodes,
        ranks_per_node=options.ranks_per_node,
        shape=shape_of(options),
        rounds=options.rounds,
        warm_up=options.warm_up,
        products=products,
    )


def measure(plan: Plan, console: Console) -> dict:
    """The whole result, ready for JSON; says on the console how far it is."""
    result = {
        "benchmark": "cluster",
        "command": shlex.join(["python", "benchmarks/cluster/cluster.py", *sys.argv[1:]]),
        **surroundings(),
        "nodes": plan.nodes,
        "ranks_per_node": plan.ranks_per_node,
        "shape": dict(plan.shape),
        "products": plan.products,
        "rounds": plan.rounds,
        "parameters": 0,
        "runs": [],
    }
    for rate in plan.rates:
        title = "one host" if rate is None else f"rate {rate}"
        with console.status(f"{title}: starting") as status, started(plan, rate) as (crew, cluster):
            crew.ask("join", products=plan.products)
            link = None
            if cluster is not None:
                status.update(f"{title}: measuring the link")
                link = measure_link(crew, cluster, plan.ranks_per_node)
            built = {}
            for name in plan.names:
                status.update(f"{title}: building {name}")
                built[name] = crew.ask("build", name=name, shape=plan.shape)
                result["parameters"] = built[name][0]["parameters"]
            turns = take_turns(crew, plan, cluster is not None, lambda text, title=title:
                               status.update(f"{title}: {text}"))
            dropped = cluster.dropped() if cluster is not None else None
        rows = summary(turns, built, plan.ranks_per_node)
        result["runs"].append({"rate": rate, "link": link, "dropped": dropped, "rows": rows})
    result["load"]["after"] = os.getloadavg()[0]
    return result


@contextlib.contextmanager
def started(plan: Plan, rate: str | None) -> Iterator[tuple[Crew, emulation.Cluster | None]]:
    """The ranks, on nodes of their own unless `rate` is None; all of it is gone afterwards."""
    with contextlib.ExitStack() as stack:
        cluster = None
        if rate is None:
            port = emulation.free_port()
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            variables["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        else:
            cluster = stack.enter_context(emulation.emulated_cluster(plan.nodes, rate))
            variables = {"MASTER_ADDR": cluster.address(0), "MASTER_PORT": str(PORT)}
            variables["GLOO_SOCKET_IFNAME"] = emulation.INTERFACE

        def host_of(node: int) -> Host:
            inside = () if cluster is None else cluster.inside(node)
            return Host(inside=inside, variables=variables)

        yield stack.enter_context(started_crew(plan.nodes, plan.ranks_per_node, host_of)), cluster


def _end(number: int, frame: FrameType | None) -> None:
    """End as the signal wants, once: what follows must not be cut short by another."""
    for one in ENDING:
        signal.signal(one, signal.SIG_IGN)
    print(f"\nstopped by {signal.Signals(number).name}", file=sys.stderr)
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
