"""ZeRO++ on an emulated cluster: step times, bytes on the wire beside the ledger's, and losses.

Every node is a network namespace of this machine, with a link of the given rate to the other nodes
(needs root, and the commands ip and tc). All configurations are built in the same processes and
take one step each in turn, so a busy machine slows all of them alike. Bytes are read from the
nodes' interfaces while every rank is idle, headers included, and shown beside the ranks' traffic
ledgers. M is the model in 16 bit, 2 bytes per parameter. Nothing else travels during a step:
gradients are not clipped, and losses are sent through pipes. The text is Python's standard library,
byte by byte. All steps before the timed ones are taken without a limit of the links, but those of
--settle; how long coded messages are depends on how many. "In pairs" are medians of the rounds'
ratios, with 95% confidence intervals.

--round-trip lets every frame arrive later, as between distant nodes (needs /dev/net/tun).

--passes adds passes without gradients, one for each token of a text, as generation without a cache
takes them, and shows what the first step and the first pass send beside the later ones: with frozen
weights (LoRA's) and hpZ they are all that sends whole weights.

--one-host runs the same ranks without an emulated network, as any user, and shows only the ledgers'
bytes. The namespaces are removed when the benchmark ends, however it ends.
"""

import sys
from collections import Counter

from rich.console import Console

from benchmarks.cluster.bf16_matmul import bf16_is_slow
from benchmarks.cluster.cluster_chart import draw
from benchmarks.cluster.cluster_rank import ClusterRank
from benchmarks.cluster.cluster_report import show, summary
from benchmarks.cluster.configurations import FSDP2, NAMES, axes_of
from benchmarks.cluster.interleaved_steps import measure_link, run_interleaved, timed_run, warm_up
from benchmarks.cluster.network import emulation
from benchmarks.cluster.started_cluster import started_cluster
from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.processes import exit_on_signals
from benchmarks.shared.zero_json import LORA, OURS
from zeropp.errors import InputError

DEFAULT_NAMES = (FSDP2, "zero3", "zeropp")
OUR_NAMES = (*NAMES, *LORA)
SHAPE = {"layers": 8, "hidden": 512, "heads": 8, "seq": 256, "vocab": 512, "micro_batches": 1}


def measure(options: Options, result: dict) -> None:
    """Measure at each rate."""
    exit_on_signals()
    result |= {
        "nodes": options.nodes,
        "ranks_per_node": options.ranks_per_node,
        "products": options.products,
        "rounds": options.rounds,
        "warm_up": options.warm_up,
        "round_trip": options.round_trip,
        "flags": options.flags,
        "parameters": 0,
        "runs": [],
    }
    round_trip = None if options.one_host else options.round_trip / 1000
    with (
        Console(stderr=True).status("starting") as status,
        started_cluster(ClusterRank, options.nodes, options.ranks_per_node, round_trip) as ranks,
    ):
        ranks.ask("join", products=options.products)
        processes = [] if options.one_host else ranks.pid_of_each_node(options.ranks_per_node)
        built = {}
        for name in options.configurations:
            status.update(f"building {name}")
            built[name] = ranks.ask("build", name=name, shape=options.shape, flags=options.flags)
        firsts = warm_up(
            ranks, options.configurations, processes, steps=options.warm_up, say=status.update
        )
        result["parameters"] = built[options.configurations[-1]][0]["parameters"]
        for rate in options.rate:
            link = None
            if not options.one_host:
                emulation.set_rate(options.nodes, rate)
                link = measure_link(ranks, rate, options.ranks_per_node)
            for name in options.configurations:
                for number in range(options.settle if "auto" in name else 0):
                    status.update(f"rate {rate}: step {number + 1} of {options.settle}: {name}")
                    timed_run(ranks, name, "step", processes)
            timed = run_interleaved(
                ranks,
                firsts,
                processes,
                rounds=options.rounds,
                passes=options.passes,
                say=lambda text, rate=rate: status.update(f"rate {rate}: {text}"),
            )
            rows = summary(timed, built, options.ranks_per_node)
            dropped = None if options.one_host else emulation.dropped()
            result["runs"].append({"rate": rate, "link": link, "dropped": dropped, "rows": rows})


def check(options: Options) -> None:
    """Complete the options; raises InputError for what is impossible."""
    options.configurations = names_of(options)
    if options.nodes < 2 and not options.one_host:
        raise InputError(f"--nodes {options.nodes}: expected at least 2")
    if options.nodes * options.ranks_per_node < 2:
        raise InputError("one rank sends nothing: give more --nodes or --ranks-per-node")
    if options.one_host and (options.rate or options.round_trip):
        flag = "--rate" if options.rate else "--round-trip"
        raise InputError(f"{flag} sets the links between nodes, and --one-host has none")
    if options.round_trip and options.nodes != 2:
        raise InputError(f"--round-trip joins two nodes, and --nodes is {options.nodes}")
    options.rate = (
        [None] if options.one_host else emulation.checked_rates(options.rate, emulation.UNLIMITED)
    )
    if options.products == "auto":
        options.products = "fp32" if bf16_is_slow() else "bf16"


def names_of(options: Options) -> tuple[str, ...]:
    """The configurations asked for, the second of a name as `zeropp 2`.

    Raises InputError for an unknown name.
    """
    asked_for = options.configurations or DEFAULT_NAMES
    for name in asked_for:
        sizes, zero_name = axes_of(name)
        if zero_name not in (OURS if sizes.keys() - {"ep"} else OUR_NAMES):
            known = ", ".join(OUR_NAMES)
            raise InputError(f"no configuration is called {name!r}; expected one of {known}")
    counts, names = Counter(), ()
    for name in asked_for:
        counts[name] += 1
        names += (name if counts[name] == 1 else f"{name} {counts[name]}",)
    return names


OPTIONS = (
    Flag(
        "configurations",
        (),
        f"of {', '.join(OUR_NAMES)} (default: {' '.join(DEFAULT_NAMES)}), or with sizes of "
        "axes in front, as in pp2-zero1, tp2-zeropp, cp2-zero3; the first is the reference; a "
        "name that is repeated is built again, which shows how much equal ones differ",
    ),
    Flag(
        "--rate",
        help="of each node's link, in each direction, as in 200mbit, or none; may be repeated "
        "(default: none)",
        is_repeated=True,
    ),
    Flag("--nodes", 2, least=1),
    Flag("--ranks-per-node", 2, least=1),
    Flag("--rounds", 10, "timed steps of each", least=1),
    Flag("--warm-up", 1, "steps before them, without a limit of the links", least=1),
    Flag("--settle", 0, "steps at each rate of those that choose whether to code, before all's"),
    Flag("--round-trip", 0, "milliseconds of a frame and its answer between two nodes"),
    Flag("--flags", "", "of pretrain_gpt.py, further ones of the model, as '--num-experts 16'"),
    Flag("--passes", 0, "without gradients, after the steps"),
    Flag("--one-host", False, "no namespaces: the ledger's bytes only"),
    Flag(
        "--products",
        "auto",
        "multiply bf16 matrices in this dtype; auto: in fp32 where that is faster, as on "
        "processors without bf16 arithmetic",
        choices=("auto", "bf16", "fp32"),
    ),
)
BENCHMARK = Benchmark(
    __spec__, __doc__, measure, show, OPTIONS, shape=SHAPE, check=check, draw=draw
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
