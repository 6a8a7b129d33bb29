"""Whether quantizing changes what is learnt: arms of ZeRO++ trained on real text, seed by seed.

    python benchmarks/convergence/convergence.py [--json FILE] [--plot FILE.png] [--results FILE.md]

Every arm trains the same small GPT, by pretrain_gpt.py's own step, on the text of Python's standard
library, from the same weights and over the same samples as the baseline of its seed. Runs that are
finished are kept in FOLDER/runs.jsonl, so a table that was interrupted goes on where it stopped;
only runs of the same settings count.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.convergence.arms import ARMS, BASELINE, FLAGS, Recipe  # noqa: E402
from benchmarks.convergence.comparison import (  # noqa: E402
    Row,
    Runs,
    compare,
    curves,
    markdown_table,
    text_table,
    to_json,
    verdict,
)
from benchmarks.convergence.curves import draw, require_drawing  # noqa: E402
from benchmarks.shared.surroundings import surroundings  # noqa: E402
from tools.faster_precision import MARGIN, seconds  # noqa: E402
from zeropp.atomic import write_atomically  # noqa: E402
from zeropp.errors import InputError  # noqa: E402

KEPT = "runs.jsonl"
RANK_SCRIPT = Path(__file__).with_name("convergence_rank.py")
USAGE_ERROR, FAILED = 2, 1


class RunFailed(RuntimeError):
    """The ranks of a run ended without an answer."""


def main() -> int:
    """Train what is not yet trained, then print and write the table."""
    options = read_options()
    try:
        recipe = recipe_of(options)
        check(options, recipe)
        runs = train_missing(options.arms, options.seeds, recipe, Path(options.folder) / KEPT)
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    meanings = "; ".join(f"{name}: {arm.meaning}" for name, arm in ARMS.items())
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS),
                        metavar="ARM", help=meanings)
    parser.add_argument("--seeds", nargs="+", type=int, default=(1, 2, 3), metavar="SEED",
                        help="the same for every arm (default: 1 2 3)")
    parser.add_argument("--steps", type=int, default=500, metavar="N",
                        help="iterations of a run (default: 500)")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="default: 4")
    parser.add_argument("--ranks-per-node", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="default: what multiplies faster")
    parser.add_argument("--eval-interval", type=int, default=100, metavar="N",
                        help="iterations between held-out losses (default: 100)")
    parser.add_argument("--eval-samples", type=int, default=512, metavar="N",
                        help="held-out samples of each, always the same (default: 512)")
    parser.add_argument("--flags", default="", help="more flags of pretrain_gpt.py, for every arm")
    parser.add_argument("--folder", default="runs/convergence", help="default: runs/convergence")
    parser.add_argument("--json", metavar="FILE", help="write the result here; - prints only it")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the curves (needs matplotlib)")
    parser.add_argument("--results", metavar="FILE.md", help="write a page with all of it")
    return parser.parse_args()  # fmt: skip


def recipe_of(options: argparse.Namespace) -> Recipe:
    """What all runs share, with the faster format where none was asked for."""
    return Recipe(
        steps=options.steps,
        ranks=options.ranks,
        ranks_per_node=options.ranks_per_node,
        dtype=options.dtype or faster_dtype(),
        eval_interval=options.eval_interval,
        eval_samples=options.eval_samples,
        flags=f"{FLAGS} {options.flags}".strip(),
    )


def faster_dtype() -> str:
    """bf16 where this machine multiplies it faster than fp32, as tools/faster_precision.py does."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    faster = seconds(torch.float32, device) > MARGIN * seconds(torch.bfloat16, device)
    return "bf16" if faster else "fp32"


def check(options: argparse.Namespace, recipe: Recipe) -> None:
    """Raise InputError for what would fail, or say nothing, only after hours."""
    for name, least in (("steps", 1), ("ranks", 2), ("ranks_per_node", 1), ("eval_interval", 1)):
        if getattr(recipe, name) < least:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} {getattr(recipe, name)}: expected at least {least}")
    if recipe.ranks % recipe.ranks_per_node:
        raise InputError(
            f"--ranks-per-node {recipe.ranks_per_node} does not divide --ranks {recipe.ranks}"
        )
    if BASELINE not in options.arms:
        raise InputError(f"--arms {' '.join(options.arms)}: add {BASELINE}, to compare with")
    for name in ("arms", "seeds"):
        given = getattr(options, name)
        if len(set(given)) < len(given):
            raise InputError(f"--{name} {' '.join(map(str, given))}: each only once")
    if options.plot:
        require_drawing(Path(options.plot))
    for arm in options.arms:
        recipe.config(arm, options.seeds[0])


def train_missing(
    arms: Sequence[str], seeds: Sequence[int], recipe: Recipe, kept: Path
) -> Runs:
    """All runs of the table: those kept from before, and the others trained now, seed by seed."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    found = read_kept(kept, recipe)
    missing = [(arm, seed) for seed in seeds for arm in arms if (arm, seed) not in found]
    if found:
        print(f"{len(arms) * len(seeds) - len(missing)} runs are kept in {kept}", file=sys.stderr)
    for number, (arm, seed) in enumerate(missing, 1):
        print(f"run {number} of {len(missing)}: {arm}, seed {seed}", file=sys.stderr, flush=True)
        found[arm, seed] = run = train(arm, seed, recipe)
        keep(kept, run)
    return {arm: {seed: found[arm, seed] for seed in seeds} for arm in arms}


def read_kept(path: Path, recipe: Recipe) -> dict[tuple[str, int], dict]:
    """The finished runs of this recipe, by arm and seed; the JSON of an arm must be today's."""
    lines = path.read_text().splitlines() if path.exists() else []
    runs = [run for run in map(json.loads, lines) if run["recipe"] == asdict(recipe)]
    return {
        (run["arm"], run["seed"]): run
        for run in runs
        if run["arm"] in ARMS and run["zero"] == recipe.zero(run["arm"])
    }


def keep(path: Path, run: dict) -> None:
    """Add a finished run to the file."""
    before = path.read_bytes() if path.exists() else b""
    text = before + json.dumps(run).encode() + b"\n"
    write_atomically(path, lambda file: file.write(text))


def train(arm: str, seed: int, recipe: Recipe) -> dict:
    """One run on ranks of its own; raises RunFailed if they end without an answer."""
    about = {"arm": arm, "seed": seed, "recipe": asdict(recipe), "zero": recipe.zero(arm)}
    here = surroundings()
    with tempfile.TemporaryDirectory() as folder:
        order, answer = Path(folder, "order.json"), Path(folder, "answer.json")
        order.write_text(json.dumps(about))
        command = [sys.executable, "-m", "zeropp.ranks.launcher", "--num_ranks", str(recipe.ranks)]
        command += ["--ranks_per_node", str(recipe.ranks_per_node)]
        command += [str(RANK_SCRIPT), str(order), str(answer)]
        status = subprocess.run(command, cwd=ROOT, stdout=sys.stderr).returncode
        if status != 0 or not answer.exists():
            raise RunFailed(
                f"{arm}, seed {seed}: its ranks ended with status {status}; finished runs are "
                "kept, the same command goes on with this one"
            )
        found = json.loads(answer.read_text())
    facts = {name: here[name] for name in ("date", "commit", "uncommitted", "load")}
    return {**about, **facts, **found}


def write_everything(options: argparse.Namespace, recipe: Recipe, runs: Runs) -> None:
    """The table on the screen, and the files asked for."""
    rows = compare(runs)
    result = {
        "benchmark": "convergence",
        "command": shlex.join(["python", "benchmarks/convergence/convergence.py", *sys.argv[1:]]),
        **surroundings(),
        "recipe": asdict(recipe),
        "seeds": list(options.seeds),
        "rows": to_json(rows),
        "runs": [run for of_seeds in runs.values() for run in of_seeds.values()],
    }
    text = json.dumps(result, indent=1) + "\n"
    if options.json == "-":
        print(text, end="")
    else:
        print("\n".join([*heading(result), "", text_table(rows), *filter(None, [verdict(rows)])]))
    if options.json not in (None, "-"):
        write_atomically(Path(options.json), lambda file: file.write(text.encode()))
    if options.plot:
        draw(curves(runs), Path(options.plot), subject(result))
    if options.results:
        page = results_page(result, rows, options.plot)
        write_atomically(Path(options.results), lambda file: file.write(page.encode()))


def heading(result: dict) -> list[str]:
    """Lines that say what was run, where, and when."""
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
    """The comparison in a line."""
    recipe, runs = result["recipe"], result["runs"]
    return (
        f"{runs[0]['parameters'] / 1e6:.2f} M parameters, {recipe['steps']} iterations, "
        f"seeds {', '.join(map(str, result['seeds']))}, {recipe['dtype']}, {recipe['ranks']} ranks "
        f"as nodes of {recipe['ranks_per_node']}"
    )


def results_page(result: dict, rows: Sequence[Row], plot: str | None) -> str:
    """All of it as a page for benchmarks/results/."""
    recipe = result["recipe"]
    baseline = next(row for row in rows if row.arm == BASELINE)
    lines = [f"# Convergence, {result['date'][:10]}", "", f"`{result['command']}`", ""]
    lines += [f"- {line}" for line in heading(result)]
    lines += [
        f"- `pretrain_gpt.py` with `{recipe['flags']}`; the default text",
        f"- held-out loss: {recipe['eval_samples']} samples, the same for every arm of a seed; "
        f"{baseline.first:.3f} before training",
        "",
        markdown_table(rows),
        "",
        verdict(rows) or "",
        "",
        "Differences are taken within a seed and averaged. The bump is the largest difference of "
        "the training loss, smoothed over 20 iterations and averaged over seeds. Bytes are those "
        "a node sends in a training step, by the ledger. Times are medians on a shared machine.",
    ]
    if plot:
        lines += ["", f"![Training and held-out losses, and differences]({Path(plot).name})"]
    lines += ["", "Seed by seed, held-out loss at the end:", ""]
    return "\n".join([*lines, seed_table(result), ""])


def seed_table(result: dict) -> str:
    """Final held-out losses by arm and seed, as a table in Markdown."""
    seeds, finals = result["seeds"], {}
    for run in result["runs"]:
        finals.setdefault(run["arm"], {})[run["seed"]] = run["held_out"][-1][1]
    lines = [["", *(f"seed {seed}" for seed in seeds)], ["---"] * (len(seeds) + 1)]
    lines += [[arm, *(f"{found[seed]:.4f}" for seed in seeds)] for arm, found in finals.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _commit(run: dict) -> str:
    return f"{(run['commit'] or 'unknown')[:12]}{' + changes' if run['uncommitted'] else ''}"


if __name__ == "__main__":
    sys.exit(main())
