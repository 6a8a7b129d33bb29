"""The README's table and picture: made of results that are committed beside them."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.cluster import headline
from benchmarks.shared.zero_json import zero_json
from tests.launched import ROOT
from zeropp import ZeroConfig
from zeropp.errors import InputError

README = (ROOT / "README.md").read_text()
RESULTS = [
    ROOT / f"{name}.json" for name in re.findall(r"\((benchmarks/results/[\w-]+)\.md\)", README)
]


def test_the_readme_says_what_the_committed_results_say():
    cluster, convergence = [path for path in RESULTS if path.exists()]
    assert headline.with_headline(README, headline.headline(cluster, convergence)) == README
    assert cluster.with_suffix(".png").exists() and cluster.with_suffix(".md").exists()
    pictured = headline.pictured(json.loads(cluster.read_text()))
    assert [run["rate"] for run in pictured["runs"]] == list(headline.PICTURE_RATES)
    for run in pictured["runs"]:
        assert [row["name"] for row in run["rows"]] == list(headline.NAMES.values())


@pytest.mark.parametrize("name", headline.JSONS)
def test_the_files_that_the_readme_names_set_what_was_measured(name: str):
    measured = zero_json(name, ranks_per_node=2)
    if name != headline.OURS:
        assert measured["zeropp"].pop("code_messages") is False  # the README says so
    file = headline.JSONS[name]
    theirs, ours = ZeroConfig.from_json(measured), ZeroConfig.from_json(ROOT / file)
    assert ours.zero_optimization == theirs.zero_optimization and ours.zeropp == theirs.zeropp
    assert f"`{file}`" in README


def test_a_result_without_a_configuration_and_a_readme_without_its_place_are_refused(
    tmp_path: Path,
):
    cluster, convergence = [path for path in RESULTS if path.exists()]
    result = json.loads(cluster.read_text())
    for run in result["runs"]:
        run["rows"] = [row for row in run["rows"] if row["name"] != "fsdp2-ring"]
    poor = tmp_path / "poor.json"
    poor.write_text(json.dumps(result))
    with pytest.raises(InputError, match="the result has no fsdp2-ring"):
        headline.headline(poor, convergence)
    with pytest.raises(InputError, match="the README has no lines <!-- headline: begin -->"):
        headline.with_headline("# Title\n", "table\n")
