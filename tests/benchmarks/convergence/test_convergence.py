"""The convergence benchmark: its arithmetic, the runs it stores and uses again, what it refuses."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.convergence import convergence
from benchmarks.convergence.comparison import (
    WINDOW,
    bits_lines,
    compare,
    curves,
    smoothed,
    table,
    verdict,
)
from benchmarks.convergence.convergence import LATER_FIELDS, read_runs, train_missing
from benchmarks.convergence.convergence_chart import COLOURS, draw
from benchmarks.convergence.convergence_rank import SpikedLearningRate
from benchmarks.convergence.variants import BASELINE, USUAL, VARIANTS, Recipe
from benchmarks.shared.charts import require_matplotlib
from benchmarks.shared.rank_processes import RankFailed
from zeropp.errors import InputError

RECIPE = Recipe(
    steps=40, ranks=4, ranks_per_node=2, dtype="fp32", eval_interval=20, eval_samples=32
)
TINY = (
    "--num-layers 1 --hidden-size 32 --seq-length 16 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 64 --micro-batch-size 1 --global-batch-size 4"
)
SMALL = ("--steps", "3", "--eval-interval", "2", "--eval-samples", "32", "--dtype", "fp32")


def result_of(final: float, training: list[float] | None = None, across: float = 1e6) -> dict:
    """The result of a run: 40 training losses, held-out losses at 0, 20 and 40."""
    return {
        "training": training or [final] * 40,
        "held_out": [[0, 9.0], [20, 7.0], [40, final]],
        "step_seconds": 0.2,
        "parameters": 5_000_000,
        "node_bytes": {"gradients/across_nodes": across, "gradients/in_node": 7e6},
    }


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status of the benchmark with these arguments."""
    monkeypatch.setattr(sys, "argv", ["convergence.py", *arguments])
    return convergence.BENCHMARK.main()


def test_differences_are_taken_seed_by_seed():
    runs = {
        BASELINE: {1: result_of(4.0), 2: result_of(8.0)},
        # +10% and -5%, not the +-0% of the means
        "zeropp": {1: result_of(4.4), 2: result_of(7.6, across=3e6)},
    }
    baseline, row = compare(runs)
    assert baseline["difference"] == baseline["worst"] == baseline["bump"] == 0
    assert row["final"] == pytest.approx(6.0) and row["first"] == pytest.approx(9.0)
    assert row["difference"] == pytest.approx(0.025)
    assert (row["worst"], row["worst_seed"]) == (pytest.approx(0.1), 1)
    assert row["node_bytes"] == pytest.approx(2e6)  # across nodes only
    assert row["of_model"] == pytest.approx(0.2)  # of 10 MB in 16 bit
    assert row["error"] == pytest.approx(0.075)  # half of the distance of two seeds
    assert verdict([baseline, row]).endswith("+2.50% from the baseline's, NOT within 0.5%.")
    assert verdict([baseline]) is None
    for difference in (0.0049, -0.0049, 0.0051, -0.0051):
        runs = {BASELINE: {1: result_of(5.0)}, "zeropp": {1: result_of(5.0 * (1 + difference))}}
        assert ("NOT" in verdict(compare(runs))) == (abs(difference) > 0.005)


def test_a_bump_is_found_where_the_smoothed_loss_is_farthest_above():
    flat = [5.0] * 40
    raised = flat[:25] + [6.0] * 5 + flat[30:]  # iterations 26 to 30 are 1 higher
    runs = {BASELINE: {1: result_of(5.0, flat)}, "qgz": {1: result_of(5.0, raised)}}
    row = compare(runs)[1]
    assert smoothed(flat[:1]) == [(1, 5.0)] and smoothed([*flat, 25.0])[-1] == (41, 6.0)
    assert row["bump"] == pytest.approx(5 / WINDOW / 5.0) and row["bump_at"] == 30
    assert row["difference"] == 0
    both = {
        BASELINE: {1: result_of(5.0, flat), 2: result_of(5.0, flat)},
        "qgz": {1: result_of(5.0, raised), 2: result_of(5.0, flat)},
    }
    assert compare(both)[1]["bump"] == pytest.approx(row["bump"] / 2)  # a mean over the seeds


def test_the_table_has_every_variant_and_its_numbers():
    none = result_of(5.0)
    coded = [{**none, "bits": {"weight": bits, "gradient": 3.0}} for bits in (0.5, 1.0)]
    rows = compare({BASELINE: {1: none, 2: none}, "code-steps": dict(enumerate(coded, 1))})
    assert bits_lines(rows) == ["code-steps: 0.75 bits a weight, 3.00 bits a gradient"]
    rows = compare({BASELINE: {3: none}, "qwz": {3: result_of(5.01, across=2.5e6)}})
    line = next(line for line in table(rows).splitlines() if "qwz" in line)
    expected = "| qwz | 5.0100 | +0.20% ± 0.00% | +0.20% (3) | +0.20% | 20 | 2.50 | 0.250 | 200 |"
    assert " ".join(line.split()) == expected


def test_curves_are_drawn_where_matplotlib_is(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    runs = {variant: {1: result_of(5.0 + number / 100)} for number, variant in enumerate(VARIANTS)}
    assert len(COLOURS) >= len(USUAL)
    drawn = curves(runs)
    assert drawn[1].held_out_difference[-1] == (40, pytest.approx(0.002))
    draw(drawn, tmp_path / "curves.png", "a title")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install matplotlib"):
        require_matplotlib(Path("curves.png"))


def test_variants_differ_in_zeropp_alone():
    configs = {variant: RECIPE.config(variant, seed=7) for variant in VARIANTS}
    for name, config in configs.items():
        sections = ("zero", "optimizer", "muon", "schedule")
        adam = {section: getattr(configs[BASELINE], section) for section in sections}
        assert replace(config, **adam) == configs[BASELINE]
        assert config.optimizer.optimizer == ("muon" if name.startswith("muon") else "adam")
        zero, own = config.zero.zero_optimization, config.zero.zeropp
        assert config.zero.stage == 3 and own.ranks_per_node == 2
        assert (own.sync_every > 1) == ("local-" in name)
        coded, whole = "code-steps" in name, name.startswith(("zeropp", "code-steps"))
        assert own.weight_steps == coded and own.code_messages == coded
        assert zero.zero_quantized_weights == (coded or whole or name == "qwz")
        assert (zero.zero_hpz_partition_size == 2) == (coded or whole or name == "hpz")
        assert zero.zero_quantized_gradients == (coded or whole or name == "qgz")
    mixture = replace(RECIPE, flags=f"{RECIPE.flags} --num-experts 4 --disable-bias-linear")
    bits = {name: mixture.config(name, seed=7).parallel.moe_dispatch_bits for name in VARIANTS}
    assert bits == {**dict.fromkeys(VARIANTS, 16), "int8-tokens": 8}
    blocks = [configs[f"muon{name}"].zero.zeropp for name in ("", "-whole", "-every-5")]
    assert [(each.muon_blocks, each.muon_whole_every) for each in blocks] == [
        ("node", None), ("whole", None), ("node", 5)
    ]  # fmt: skip


def test_variants_have_the_learning_rates_of_their_optimizers():
    recipe = replace(RECIPE, muon_lr=2e-2, local_lr=1e-3, outer_lr=0.9, outer_momentum=0.1)
    names = (BASELINE, "local-10", "muon", "muon-local-10")
    configs = [recipe.config(name, seed=7) for name in names]
    assert [config.optimizer.lr for config in configs] == [3e-3, 1e-3, 2e-2, 2e-2]
    outer = [(c.zero.zeropp.outer_lr, c.zero.zeropp.outer_momentum) for c in configs]
    assert outer == [(0.7, 0.5), (0.9, 0.1), (0.7, 0.5), (0.9, 0.1)]
    assert replace(RECIPE, local_lr=None).config("local-10", seed=7).optimizer.lr == 3e-3


def test_a_table_goes_on_where_it_stopped(tmp_path, monkeypatch):
    path, trained = tmp_path / "folder" / "runs.jsonl", []

    def train(variant: str, seed: int, recipe: Recipe) -> dict:
        trained.append((variant, seed))
        if len(trained) == 4:
            raise RankFailed("cut off")
        order = {"recipe": asdict(recipe), "zero": recipe.zero(variant)}
        return {"variant": variant, "seed": seed, **order, **result_of(5.0)}

    monkeypatch.setattr(convergence, "train", train)
    with pytest.raises(RankFailed):
        train_missing([BASELINE, "qwz"], [1, 2], RECIPE, path)
    assert trained == [(BASELINE, 1), ("qwz", 1), (BASELINE, 2), ("qwz", 2)]
    runs = train_missing([BASELINE, "qwz"], [1, 2], RECIPE, path)
    assert trained[4:] == [("qwz", 2)]
    seeds = {variant: list(of_seeds) for variant, of_seeds in runs.items()}
    assert seeds == {BASELINE: [1, 2], "qwz": [1, 2]}
    train_missing([BASELINE, "qwz"], [1, 2], RECIPE, path)
    assert len(trained) == 5
    assert len(path.read_text().splitlines()) == 4


def test_runs_of_other_settings_do_not_count(tmp_path):
    path = tmp_path / "runs.jsonl"

    def add(variant: str, seed: int, **order: object) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"variant": variant, "seed": seed, **order}) + "\n")

    order = {"recipe": asdict(RECIPE), "zero": RECIPE.zero("qgz")}
    add("qgz", 1, **order)
    add("qgz", 2, **order | {"zero": RECIPE.zero("zeropp")})
    add("a variant of another day", 1, **order)
    old = {key: value for key, value in asdict(RECIPE).items() if key not in LATER_FIELDS}
    add("qgz", 3, recipe=old, zero=order["zero"])  # as older files say
    assert list(read_runs(path, RECIPE)) == [("qgz", 1), ("qgz", 3)]
    assert not read_runs(path, replace(RECIPE, steps=41))
    assert not read_runs(path, replace(RECIPE, lr_spike=5))
    for name in ("muon", "local-10", "muon-local-10"):
        add(name, 1, recipe=old, zero=RECIPE.zero(name))
    concerned = {
        "muon_lr": {"muon", "muon-local-10"},
        "local_lr": {"local-10"},
        "outer_lr": {"local-10", "muon-local-10"},
        "outer_momentum": {"local-10", "muon-local-10"},
    }
    for field, names in concerned.items():
        left = {name for name, _ in read_runs(path, replace(RECIPE, **{field: 0.2}))}
        assert left == {"qgz", "muon", "local-10", "muon-local-10"} - names
    assert not read_runs(path, replace(RECIPE, flags=RECIPE.flags + " --lr 1e-3"))


def test_two_variants_from_start_to_table(tmp_path, monkeypatch, capfd):
    arguments = [*SMALL, "--variants", BASELINE, "qwz", "--seeds", "5", "--flags", TINY]
    arguments += ["--ranks", "2", "--ranks-per-node", "1", "--folder", str(tmp_path / "runs")]
    arguments += ["--lr-spike", "2", "--results", str(tmp_path / "page.md"), "--json"]
    assert run(monkeypatch, *arguments, str(tmp_path / "result.json")) == 0, capfd.readouterr().err
    result = json.loads((tmp_path / "result.json").read_text())
    baseline, qwz = result["runs"]
    for each in (baseline, qwz):
        assert len(each["training"]) == 3
        assert [iteration for iteration, _ in each["held_out"]] == [0, 2, 3]
    difference = qwz["held_out"][-1][1] / baseline["held_out"][-1][1] - 1
    assert result["rows"][1]["difference"] == pytest.approx(difference)
    assert 0 < abs(difference) < 0.01  # it is quantized, and three steps change little
    sent = [each["node_bytes"]["weights_forward/across_nodes"] for each in (baseline, qwz)]
    assert sent[0] / 4 < sent[1] < sent[0] / 3  # INT8 and scales instead of fp32
    page, printed = (tmp_path / "page.md").read_text(), capfd.readouterr().out
    assert "| qwz " in page and "| qwz " in printed

    assert run(monkeypatch, *arguments, "-") == 0
    printed, errors = capfd.readouterr()
    assert "2 finished runs are in" in errors and "run 1 of" not in errors
    assert json.loads(printed)["runs"] == result["runs"]


def test_ranks_may_split_the_model(tmp_path, monkeypatch):
    """They see the same samples: losses differ by no more than fp32 sums in another order."""
    arguments = [*SMALL, "--variants", BASELINE, "--seeds", "5", "--ranks", "2"]
    arguments += ["--ranks-per-node", "1", "--folder", str(tmp_path / "runs"), "--json"]
    losses = []
    for flags in ("", " --tensor-model-parallel-size 2"):
        target = str(tmp_path / "result.json")
        assert run(monkeypatch, *arguments, target, "--flags", TINY + flags) == 0
        (only,) = json.loads(Path(target).read_text())["runs"]
        losses.append([*only["training"], *(loss for _, loss in only["held_out"])])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_spike_multiplies_the_learning_rate_of_ten_iterations():
    rate = SpikedLearningRate(lambda samples: 0.25, iteration=7, batch_size=8)
    rates = [rate(8 * (iteration - 1)) for iteration in range(1, 20)]
    assert rates == [0.25] * 6 + [1.25] * 10 + [0.25] * 3


def test_ranks_that_fail_say_how_to_continue(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RankFailed("no text")

    monkeypatch.setattr(convergence, "started_ranks", fail)
    with pytest.raises(RankFailed, match="qwz, seed 1: no text; .* the same command continues"):
        convergence.train("qwz", 1, RECIPE)
