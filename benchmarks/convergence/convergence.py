"""Whether quantization changes what is learnt: variants of ZeRO++ trained on real text.

Every variant trains the same small GPT with pretrain_gpt.py's own step, on the text of Python's
standard library, from the same weights and over the same samples as the baseline of its seed.
Finished runs are stored in FOLDER/runs.jsonl, so an interrupted comparison continues where it
stopped; only runs with the same settings, as far as they concern a variant, are used again.

With --flags the ranks may split the model too, as in `--flags "--tensor-model-parallel-size 2"`.
The variant `int8-tokens` needs a mixture whose experts are split over both nodes.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path

import torch

from benchmarks.convergence import convergence_chart
from benchmarks.convergence.comparison import (
    Runs,
    bits_lines,
    compare,
    curves,
    table,
    verdict,
)
from benchmarks.convergence.convergence_rank import VariantRank, train_variant
from benchmarks.convergence.variants import (
    BASELINE,
    FLAGS,
    RATES,
    SPIKE,
    SPIKE_FACTOR,
    USUAL,
    VARIANTS,
    Recipe,
)
from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.rank_processes import RankFailed, started_ranks
from benchmarks.shared.result import environment_report, write_text
from benchmarks.shared.table import markdown_table
from tools.faster_precision import MARGIN, seconds
from zeropp.errors import InputError

FINISHED_RUNS = "runs.jsonl"
# Fields that recipes of older files do not have, with the values that they stood for.
LATER_FIELDS = {
    field.name: field.default for field in fields(Recipe) if field.default is not MISSING
}


def measure(options: Options, result: dict) -> None:
    """Train the missing runs and compare all."""
    recipe = recipe_of(options)
    path = Path(options.folder) / FINISHED_RUNS
    runs = train_missing(options.variants, options.seeds, recipe, path)
    result |= {
        "recipe": asdict(recipe),
        "seeds": list(options.seeds),
        "rows": compare(runs),
        "runs": [run for of_seeds in runs.values() for run in of_seeds.values()],
    }


def recipe_of(options: Options) -> Recipe:
    """What all runs share."""
    given = {field.name: getattr(options, field.name) for field in fields(Recipe)}
    return Recipe(**given | {"flags": f"{FLAGS} {options.flags}".strip()})


def faster_dtype() -> str:
    """bf16 where this machine multiplies it faster than fp32, as tools/faster_precision.py does."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    faster = seconds(torch.float32, device) > MARGIN * seconds(torch.bfloat16, device)
    return "bf16" if faster else "fp32"


def check(options: Options) -> None:
    """Raise InputError for what would fail, or have no effect, only after hours."""
    options.dtype = options.dtype or faster_dtype()
    recipe = recipe_of(options)
    if not 0 <= recipe.lr_spike <= recipe.steps:
        raise InputError(f"--lr-spike {recipe.lr_spike}: expected one of the {recipe.steps} steps")
    per_node, ranks = recipe.ranks_per_node, recipe.ranks
    if ranks % per_node:
        raise InputError(f"--ranks-per-node {per_node} does not divide --ranks {ranks}")
    if BASELINE not in options.variants:
        names = " ".join(options.variants)
        raise InputError(f"--variants {names}: add {BASELINE}, to compare with")
    for name in ("variants", "seeds"):
        values = getattr(options, name)
        if len(set(values)) < len(values):
            raise InputError(f"--{name} {' '.join(map(str, values))}: give each only once")
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
        run = runs[variant, seed] = train(variant, seed, recipe)
        before = path.read_text() if path.exists() else ""
        write_text(path, f"{before}{json.dumps(run)}\n")
    return {variant: {seed: runs[variant, seed] for seed in seeds} for variant in variants}


def read_runs(path: Path, recipe: Recipe) -> dict[tuple[str, int], dict]:
    """The finished runs of this recipe by variant and seed, if their JSON is still the same."""
    lines = path.read_text().splitlines() if path.exists() else []
    runs = {}
    for line in lines:
        run = json.loads(line)
        variant = run.setdefault("variant", run.get("arm"))  # "arm" in files of November 2026
        if variant not in VARIANTS:
            continue
        stored = Recipe(**{**LATER_FIELDS, **run["recipe"]})
        if stored.of(variant) == recipe.of(variant) and run["zero"] == recipe.zero(variant):
            runs[variant, run["seed"]] = run
    return runs


def train(variant: str, seed: int, recipe: Recipe) -> dict:
    """One run on several ranks; raises RankFailed if they end without an answer."""
    order = {"variant": variant, "seed": seed, "recipe": asdict(recipe)}
    report = environment_report()
    try:
        with started_ranks(VariantRank, recipe.ranks, recipe.ranks_per_node) as ranks:
            answer, _ = train_variant(ranks, variant, seed, recipe)
    except (InputError, RankFailed) as failure:
        raise RankFailed(
            f"{variant}, seed {seed}: {failure}; finished runs are stored, and the same command "
            "continues with this one"
        ) from failure
    facts = {name: report[name] for name in ("date", "commit", "uncommitted", "load")}
    return {**order, "zero": recipe.zero(variant), **facts, **answer}


def draw(result: dict, path: Path) -> None:
    """Write the curves of all variants as PNG."""
    by_variant: dict[str, dict[int, dict]] = {}
    for run in result["runs"]:
        by_variant.setdefault(run["variant"], {})[run["seed"]] = run
    convergence_chart.draw(curves(by_variant), path, subject(result))


def show(result: dict) -> str:
    """The table of variants, what was compared, and each seed's losses."""
    recipe, runs, rows = result["recipe"], result["runs"], result["rows"]
    loads = [run["load"]["before"] for run in runs]
    baseline = next(row for row in rows if row["variant"] == BASELINE)
    facts = [
        subject(result),
        f"runs from {min(run['date'] for run in runs)} on, of commit "
        f"{', '.join(sorted(set(map(_commit, runs))))}; load before a run "
        f"{statistics.median(loads):.1f} (largest {max(loads):.1f})",
        f"`pretrain_gpt.py` with `{recipe['flags']}`",
        f"held-out loss: {recipe['eval_samples']} samples, the same for every variant of a seed; "
        f"{baseline['first']:.3f} before training",
    ]
    meaning = (
        "Differences are taken within a seed and averaged, ± their standard error. The bump is the "
        "largest difference of the training loss, smoothed over 20 iterations and averaged over "
        "seeds. Bytes are those a node sends in a training step, by its ranks' traffic ledgers; M "
        "is the model in 16 bit. Times are medians on a shared machine."
    )
    lists = ["\n".join(f"- {line}" for line in lines) for lines in (facts, bits_lines(rows))]
    seeds = f"Seed by seed, held-out loss at the end:\n\n{seed_table(result)}"
    parts = [lists[0], table(rows), verdict(rows), meaning, lists[1], seeds]
    return "\n\n".join(filter(None, parts))


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


OPTIONS = (
    Flag(
        "--variants",
        USUAL,
        "; ".join(f"{name}: {variant.meaning}" for name, variant in VARIANTS.items()),
        choices=tuple(VARIANTS),
    ),
    Flag("--seeds", (1, 2, 3), "the same for every variant"),
    Flag("--steps", 500, "iterations of a run", least=1),
    Flag("--ranks", 4, least=2),
    Flag("--ranks-per-node", 2, least=1),
    Flag("--dtype", help="default: the one that multiplies faster", choices=("fp32", "bf16")),
    Flag("--eval-interval", 100, "iterations between held-out losses", least=1),
    Flag("--eval-samples", 512, "samples of each held-out loss, always the same"),
    Flag(
        "--lr-spike",
        0,
        f"multiply the learning rate by {SPIKE_FACTOR:g} in {SPIKE} iterations from this one",
    ),
    *RATES,
    Flag("--flags", "", "further flags of pretrain_gpt.py, for every variant"),
    Flag("--folder", "runs/convergence", "for finished runs"),
)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS, check=check, draw=draw)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
