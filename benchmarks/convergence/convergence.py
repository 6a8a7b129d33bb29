"""Whether quantization changes what is learnt: variants of ZeRO++ trained on real text.

    python -m benchmarks.convergence.convergence [--json FILE] [--plot FILE.png]
        [--results FILE.md]

Every variant trains the same small GPT with pretrain_gpt.py's own step, on the text of Python's
standard library, from the same weights and over the same samples as the baseline of its seed.
Finished runs are stored in FOLDER/runs.jsonl, so an interrupted comparison continues where it
stopped; only runs with the same settings are used again.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.convergence.comparison import (
    Row,
    Runs,
    compare,
    curves,
    levels_lines,
    table,
    verdict,
)
from benchmarks.convergence.convergence_chart import draw
from benchmarks.convergence.variants import (
    BASELINE,
    FLAGS,
    SPIKE,
    SPIKE_FACTOR,
    VARIANTS,
    Recipe,
)
from benchmarks.shared.charts import require_matplotlib
from benchmarks.shared.environment_report import environment_report
from benchmarks.shared.rank_launch import RanksFailed, run_on_ranks
from benchmarks.shared.result import begin, benchmark_parser, finish, markdown_table, write_text
from tools.faster_precision import MARGIN, seconds
from zeropp.errors import InputError

FINISHED_RUNS = "runs.jsonl"
RANK_MODULE = "benchmarks.convergence.convergence_rank"
USAGE_ERROR, FAILED = 2, 1


class RunFailed(RuntimeError):
    """The ranks of a run ended without an answer."""


def main() -> int:
    """Train the missing runs, then print and write the table."""
    options = read_options()
    try:
        recipe = recipe_of(options)
        check(options, recipe)
        path = Path(options.folder) / FINISHED_RUNS
        runs = train_missing(options.variants, options.seeds, recipe, path)
    except InputError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return USAGE_ERROR
    except RunFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return FAILED
    write_everything(options, recipe, runs)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in VARIANTS.items())
    names = tuple(VARIANTS)
    add(
        "--variants",
        "--arms",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=meanings,
    )
    add(
        "--seeds",
        nargs="+",
        type=int,
        default=(1, 2, 3),
        metavar="SEED",
        help="the same for every variant (default: 1 2 3)",
    )
    add("--steps", type=int, default=500, metavar="N", help="iterations of a run (default: 500)")
    add("--ranks", type=int, default=4, metavar="N", help="default: 4")
    add("--ranks-per-node", type=int, default=2, metavar="N", help="default: 2")
    add("--dtype", choices=("fp32", "bf16"), help="default: the one that multiplies faster")
    add(
        "--eval-interval",
        type=int,
        default=100,
        metavar="N",
        help="iterations between held-out losses (default: 100)",
    )
    add(
        "--eval-samples",
        type=int,
        default=512,
        metavar="N",
        help="samples of each held-out loss, always the same (default: 512)",
    )
    add(
        "--lr-spike",
        type=int,
        default=0,
        metavar="N",
        help=f"multiply the learning rate by {SPIKE_FACTOR:g} in {SPIKE} iterations from N on",
    )
    add("--flags", default="", help="further flags of pretrain_gpt.py, for every variant")
    add("--folder", default="runs/convergence", help="default: runs/convergence")
    add("--plot", type=Path, metavar="FILE.png", help="draw the curves (needs matplotlib)")
    add("--results", type=Path, metavar="FILE.md", help="write a page with all results")
    return parser.parse_args()  # fmt: skip


def recipe_of(options: argparse.Namespace) -> Recipe:
    """What all runs share; the faster dtype unless one was given."""
    return Recipe(
        steps=options.steps,
        ranks=options.ranks,
        ranks_per_node=options.ranks_per_node,
        dtype=options.dtype or faster_dtype(),
        eval_interval=options.eval_interval,
        eval_samples=options.eval_samples,
        flags=f"{FLAGS} {options.flags}".strip(),
        lr_spike=options.lr_spike,
    )


def faster_dtype() -> str:
    """bf16 where this machine multiplies it faster than fp32, as tools/faster_precision.py does."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    faster = seconds(torch.float32, device) > MARGIN * seconds(torch.bfloat16, device)
    return "bf16" if faster else "fp32"


def check(options: argparse.Namespace, recipe: Recipe) -> None:
    """Raise InputError for what would fail, or have no effect, only after hours."""
    minimums = {"steps": 1, "ranks": 2, "ranks_per_node": 1, "eval_interval": 1}
    if not 0 <= recipe.lr_spike <= recipe.steps:
        raise InputError(f"--lr-spike {recipe.lr_spike}: expected one of the {recipe.steps} steps")
    for name, minimum in minimums.items():
        if getattr(recipe, name) < minimum:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} {getattr(recipe, name)}: expected at least {minimum}")
    if recipe.ranks % recipe.ranks_per_node:
        raise InputError(
            f"--ranks-per-node {recipe.ranks_per_node} does not divide --ranks {recipe.ranks}"
        )
    if BASELINE not in options.variants:
        names = " ".join(options.variants)
        raise InputError(f"--variants {names}: add {BASELINE}, to compare with")
    for name in ("variants", "seeds"):
        values = getattr(options, name)
        if len(set(values)) < len(values):
            raise InputError(f"--{name} {' '.join(map(str, values))}: give each only once")
    if options.plot:
        require_matplotlib(options.plot)
    for variant in options.variants:
        recipe.config(variant, options.seeds[0])


def train_missing(
    variants: Sequence[str], seeds: Sequence[int], recipe: Recipe, path: Path
) -> Runs:
    """All runs of the table: those stored in `path`, and the missing ones, trained seed by seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = read_runs(path, recipe)
    pairs = [(variant, seed) for seed in seeds for variant in variants]
    missing = [pair for pair in pairs if pair not in runs]
    if runs:
        print(f"{len(pairs) - len(missing)} finished runs are in {path}", file=sys.stderr)
    for number, (variant, seed) in enumerate(missing, 1):
        line = f"run {number} of {len(missing)}: {variant}, seed {seed}"
        print(line, file=sys.stderr, flush=True)
        run = train(variant, seed, recipe)
        runs[variant, seed] = run
        add_run(path, run)
    return {variant: {seed: runs[variant, seed] for seed in seeds} for variant in variants}


def read_runs(path: Path, recipe: Recipe) -> dict[tuple[str, int], dict]:
    """The finished runs of this recipe by variant and seed, if their JSON is still the same."""
    lines = path.read_text().splitlines() if path.exists() else []
    runs = {}
    for line in lines:
        run = json.loads(line)
        variant = run.setdefault("variant", run.get("arm"))  # "arm" in files of November 2026
        run["recipe"].setdefault("lr_spike", 0)  # not in files of those days either
        if run["recipe"] != asdict(recipe) or variant not in VARIANTS:
            continue
        if run["zero"] == recipe.zero(variant):
            runs[variant, run["seed"]] = run
    return runs


def add_run(path: Path, run: dict) -> None:
    """Append a finished run to the file."""
    before = path.read_text() if path.exists() else ""
    write_text(path, f"{before}{json.dumps(run)}\n")


def train(variant: str, seed: int, recipe: Recipe) -> dict:
    """One run on several ranks; raises RunFailed if they end without an answer."""
    order = {
        "variant": variant,
        "seed": seed,
        "recipe": asdict(recipe),
        "zero": recipe.zero(variant),
    }
    report = environment_report()
    try:
        answer = run_on_ranks(
            RANK_MODULE, recipe.ranks, [json.dumps(order)], ranks_per_node=recipe.ranks_per_node
        )
    except RanksFailed as failure:
        raise RunFailed(
            f"{variant}, seed {seed}: {failure}; finished runs are stored, and the same command "
            "continues with this one"
        ) from failure
    facts = {name: report[name] for name in ("date", "commit", "uncommitted", "load")}
    return {**order, **facts, **answer}


def write_everything(options: argparse.Namespace, recipe: Recipe, runs: Runs) -> None:
    """Print the table, and write the files asked for."""
    rows = compare(runs)
    result = {
        **begin(__spec__.name),
        "recipe": asdict(recipe),
        "seeds": list(options.seeds),
        "rows": [asdict(row) for row in rows],
        "runs": [run for of_seeds in runs.values() for run in of_seeds.values()],
    }
    lines = [*heading(result), "", table(rows), *filter(None, [verdict(rows)])]
    lines += levels_lines(rows)
    finish(result, lambda _: print("\n".join(lines)), options.json)
    if options.plot:
        draw(curves(runs), options.plot, subject(result))
    if options.results:
        write_text(options.results, results_page(result, rows, options.plot))


def heading(result: dict) -> list[str]:
    """Lines that say what ran, where, and when."""
    machine, runs = result["machine"], result["runs"]
    commits = sorted({_commit(run) for run in runs})
    loads = [run["load"]["before"] for run in runs]
    return [
        f"{min(run['date'] for run in runs)} to {result['date']}, commit {', '.join(commits)}",
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB; "
        f"torch {result['versions']['torch']}; load before a run {statistics.median(loads):.1f} "
        f"(largest {max(loads):.1f})",
        subject(result),
    ]


def subject(result: dict) -> str:
    """The comparison in one line."""
    recipe, runs = result["recipe"], result["runs"]
    spike = f", {SPIKE_FACTOR:g} times the learning rate for {SPIKE} iterations"
    spike = f"{spike} from {recipe['lr_spike']} on" if recipe["lr_spike"] else ""
    return (
        f"{runs[0]['parameters'] / 1e6:.2f} M parameters, {recipe['steps']} iterations, "
        f"seeds {', '.join(map(str, result['seeds']))}, {recipe['dtype']}, {recipe['ranks']} ranks "
        f"as nodes of {recipe['ranks_per_node']}{spike}"
    )


def results_page(result: dict, rows: Sequence[Row], plot: Path | None) -> str:
    """A Markdown page for benchmarks/results/."""
    recipe = result["recipe"]
    baseline = next(row for row in rows if row.variant == BASELINE)
    lines = [f"# Convergence, {result['date'][:10]}", "", f"`{result['command']}`", ""]
    lines += [f"- {line}" for line in heading(result)]
    lines += [
        f"- `pretrain_gpt.py` with `{recipe['flags']}`; the default text",
        f"- held-out loss: {recipe['eval_samples']} samples, the same for every variant of a seed; "
        f"{baseline.first:.3f} before training",
        "",
        table(rows),
        "",
        verdict(rows) or "",
        "",
        "Differences are taken within a seed and averaged, ± their standard error. The bump is the "
        "largest difference of the training loss, smoothed over 20 iterations and averaged over "
        "seeds. Bytes are those a node sends in a training step, by its ranks' traffic ledgers; M "
        "is the model in 16 bit. Times are medians on a shared machine.",
    ]
    lines += ["", *(f"- {line}" for line in levels_lines(rows))]
    if plot:
        lines += ["", f"![Training and held-out losses, and differences]({plot.name})"]
    lines += ["", "Seed by seed, held-out loss at the end:", ""]
    return "\n".join([*lines, seed_table(result), ""])


def seed_table(result: dict) -> str:
    """Final held-out losses by variant and seed, as a Markdown table."""
    seeds, finals = result["seeds"], {}
    for run in result["runs"]:
        finals.setdefault(run["variant"], {})[run["seed"]] = run["held_out"][-1][1]
    rows = [
        [variant, *(f"{losses[seed]:.4f}" for seed in seeds)] for variant, losses in finals.items()
    ]
    return markdown_table(["", *(f"seed {seed}" for seed in seeds)], rows)


def _commit(run: dict) -> str:
    return f"{(run['commit'] or 'unknown')[:12]}{' + changes' if run['uncommitted'] else ''}"


if __name__ == "__main__":
    sys.exit(main())
