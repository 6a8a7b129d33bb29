"""How long training takes to a held-out loss on slow links, and what crosses them.

Each variant of benchmarks.convergence.convergence trains at each rate in processes of its own. A
node is a network namespace of this machine, with a link of that rate to the others (needs root, and
the commands ip and tc). Under local SGD a node has one rank, else two, as hpZ needs; all share the
same processors. Time is that of training steps alone: held-out losses are taken between them,
while links have no limit. Bytes are read from the nodes' interfaces before and after the steps, and
shown beside the ranks' traffic ledgers. An overlapped exchange that is under way when a loss is
taken goes on meanwhile, and what of it crosses then is not read. The time to a loss is that to the
first evaluation which is not above it; without --target that is the highest of all final losses.
"""

import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.cluster.network import emulation
from benchmarks.cluster.started_cluster import started_cluster
from benchmarks.convergence.comparison import across_nodes
from benchmarks.convergence.convergence_rank import VariantRank, train_variant
from benchmarks.convergence.variants import FLAGS, RATES, VARIANTS, Recipe
from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.charts import chart
from benchmarks.shared.processes import exit_on_signals
from benchmarks.shared.rank_processes import RankProcesses
from benchmarks.shared.table import Column, table
from zeropp.errors import InputError

USUAL = ("code-steps", "muon-code-steps", "muon-local-30", "muon-local-30-overlap")
COLUMNS = (
    Column("link", "rate"),
    Column("", "variant"),
    Column("final loss", lambda row: row["losses"][-1][1], ".4f"),
    Column("ms a step", lambda row: 1e3 * row["seconds"][-1] / row["losses"][-1][0], ".0f"),
    Column("kB a step, interface", "wire", ".1f", 1e-3),
    Column("ledger", "ledger", ".1f", 1e-3),
    Column("in M", "of_model", ".4f"),
    Column("s to the loss", "seconds_to_target", ".1f"),
    Column("faster, x", "speedup", ".2f"),
)


def recipe_of(options: Options, variant: str) -> Recipe:
    """The recipe of a variant; only the number of ranks in a node is its own."""
    is_alone = VARIANTS[variant].steps_alone
    ranks_per_node = options.ranks_alone if is_alone else options.ranks_per_node
    ranks, batch = options.nodes * ranks_per_node, options.global_batch_size
    if batch % ranks:
        raise InputError(f"--global-batch-size {batch}: expected a multiple of the {ranks} ranks")
    sizes = f"--global-batch-size {batch} --micro-batch-size {batch // ranks}"
    names = ("steps", "eval_interval", "eval_samples", *(flag.field for flag in RATES))
    return Recipe(
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        dtype="fp32",
        flags=f"{FLAGS} {options.flags} {sizes}",
        **{name: getattr(options, name) for name in names},
    )


def check(options: Options) -> None:
    """Raise InputError for what would fail only after a while."""
    options.rate = emulation.checked_rates(options.rate, "20mbit", "100mbit")
    for variant in options.variants:
        recipe_of(options, variant).config(variant, options.seed)
    if options.steps % options.eval_interval:
        raise InputError(
            f"--steps {options.steps}: expected a multiple of --eval-interval "
            f"{options.eval_interval}"
        )


def measure(options: Options, result: dict) -> None:
    """Train each variant at each rate."""
    exit_on_signals()
    rows = []
    for rate in options.rate:
        for variant in options.variants:
            print(f"{variant} at {rate}", file=sys.stderr, flush=True)
            recipe = recipe_of(options, variant)
            with started_cluster(VariantRank, options.nodes, recipe.ranks_per_node, 0.0) as ranks:
                rows.append({"rate": rate, **trained(ranks, variant, rate, recipe, options.seed)})
    highest = max(row["losses"][-1][1] for row in rows)
    target = highest if options.target is None else options.target
    recipe = asdict(recipe_of(options, options.variants[0]))
    result |= {"recipe": recipe, "seed": options.seed, "target": target}
    result["rows"] = compare(rows, target)


def trained(ranks: RankProcesses, variant: str, rate: str, recipe: Recipe, seed: int) -> dict:
    """Losses by step, seconds of training up to each of them, and bytes a node sends in a step."""
    processes = ranks.pid_of_each_node(recipe.ranks_per_node)
    nodes, wire = len(processes), 0.0

    @contextmanager
    def limited() -> Iterator[None]:
        nonlocal wire
        emulation.set_rate(nodes, rate)
        before = sent_by(processes)
        yield
        wire += statistics.fmean(sent_by(processes)) - statistics.fmean(before)
        emulation.set_rate(nodes, emulation.UNLIMITED)

    run, seconds = train_variant(ranks, variant, seed, recipe, limited)
    return {
        "variant": variant,
        "parameters": run["parameters"],
        "losses": run["held_out"],
        "seconds": seconds,
        "wire": wire / recipe.steps,
        "ledger": across_nodes(run["node_bytes"]),
        "of_model": wire / recipe.steps / (2 * run["parameters"]),
    }


def sent_by(processes: list[int]) -> list[int]:
    """Bytes that each node has sent to others, headers included."""
    return [emulation.counters(each)[emulation.INTERFACE].sent for each in processes]


def compare(rows: list[dict], target: float) -> list[dict]:
    """The rows with the time to the target; how much faster than the first of the same rate."""
    first: dict[str, float | None] = {}
    compared = []
    for row in rows:
        reached = [
            at for at, (_, loss) in zip(row["seconds"], row["losses"], strict=True)
            if loss <= target
        ]  # fmt: skip
        seconds = reached[0] if reached else None
        reference = first.setdefault(row["rate"], seconds)
        speedup = reference / seconds if reference and seconds else None
        compared.append({**row, "seconds_to_target": seconds, "speedup": speedup})
    return compared


def show(result: dict) -> str:
    """The table."""
    recipe, rows = result["recipe"], result["rows"]
    return (
        f"- {rows[0]['parameters'] / 1e6:.2f} M parameters, {recipe['steps']} iterations, seed "
        f"{result['seed']}, {recipe['ranks']} ranks as nodes of {recipe['ranks_per_node']}, fp32\n"
        f"- `pretrain_gpt.py` with `{recipe['flags']}`\n"
        f"- the loss: {result['target']:.4f}, held out, taken every {recipe['eval_interval']} "
        f"iterations\n\n{table(rows, *COLUMNS)}\n\n"
        "Bytes are what a node sends to the others in a step, on average; M is the model in 16 bit."
    )


def draw(result: dict, path: Path) -> None:
    """Write the PNG: held-out losses over the seconds of training, a panel for each rate."""
    rates = list(dict.fromkeys(row["rate"] for row in result["rows"]))
    with chart(path, (4.8 * len(rates), 4.2), len(rates), sharey=True) as (_, panels):
        for panel, rate in zip(panels, rates, strict=True):
            for row in (row for row in result["rows"] if row["rate"] == rate):
                losses = [loss for _, loss in row["losses"]]
                panel.plot(row["seconds"], losses, label=row["variant"], linewidth=1.4)
            panel.axhline(result["target"], color="#555555", linewidth=0.8, linestyle=":")
            panel.set_title(f"links of {rate}", fontsize=10)
            panel.set_xlabel("seconds of training")
        panels[0].set_ylabel("held-out loss, nats per token")
        panels[0].legend(frameon=False, fontsize=8)


OPTIONS = (
    Flag("--variants", USUAL, "the first is the reference", choices=tuple(VARIANTS)),
    Flag(
        "--rate",
        help="of each node's link, in each direction (default: 20mbit and 100mbit)",
        is_repeated=True,
    ),
    Flag("--nodes", 2, least=2),
    Flag("--ranks-per-node", 2, "of variants without local SGD", least=1),
    Flag("--ranks-alone", 1, "of a node under local SGD", least=1),
    Flag("--global-batch-size", 8, "samples of a step of all ranks", least=1),
    Flag("--steps", 600, "iterations of a run", least=1),
    Flag("--seed", 1),
    Flag("--eval-interval", 20, "iterations between held-out losses", least=1),
    Flag("--eval-samples", 256, "samples of each held-out loss, always the same"),
    Flag("--target", help="the loss; default: the highest of all final ones", type=float),
    *RATES,
    Flag("--flags", "", "further flags of pretrain_gpt.py, for every variant"),
)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS, check=check, draw=draw)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
