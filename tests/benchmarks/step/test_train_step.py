"""The benchmark of the training step: what it reports, what it refuses, and what it counts."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.shared.setting import Setting
from benchmarks.step.contest import Disagreement, Feeds, verify
from benchmarks.step.contestants import fsdp2, zeropp_loop
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.memory.model_state import formula, live_storages, paper
from megatron_zpp.parallel.mesh import Ranks
from tests.ranks import ranks
from zeropp.ranks.topology import Environment

ROOT = Path(__file__).resolve().parents[3]
TINY = {
    "layers": 2, "hidden": 32, "heads": 2, "seq": 16, "vocab": 100, "micro-batch": 1,
    "micro-batches": 2,
}


def run(*arguments: str) -> subprocess.CompletedProcess:
    shape = [text for name, value in TINY.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "benchmarks/step/train_step.py", *shape, "--rounds", "1", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[dict, str]:
    path = tmp_path_factory.mktemp("benchmark") / "result.json"
    done = run("--ranks", "2", "--memory-ranks", "1", "2", "--json", str(path))
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


def test_every_contest_is_verified_and_timed(finished):
    result, _ = finished
    names = [contest["name"] for contest in result["contests"]]
    assert names == ["one rank, fp32", "2 ranks, stage 3, fp32", "2 ranks, stage 3, bf16"]
    for contest in result["contests"]:
        verified = contest["verified"]
        for what, allowed in verified["allowed"].items():
            assert 0 <= verified["differences"][what] <= allowed
        first, *others = contest["contestants"]
        assert first["name"] == contest["peer"] and first["ratio"] == 1
        assert others[-1]["name"] == "ours"
        for one in others:
            assert one["ratio"] == pytest.approx(one["median"] / first["median"])
            assert len(one["seconds"]) == result["rounds"] and min(one["seconds"]) > 0


def test_the_surroundings_are_recorded(finished):
    result, _ = finished
    assert result["command"].startswith("python benchmarks/step/train_step.py --layers 2")
    assert result["versions"]["torch"] == torch.__version__
    assert result["machine"]["cores"] > 0
    assert result["shape"] == TINY


def test_memory_is_within_a_tenth_of_the_formula(finished):
    rows = finished[0]["memory"]
    assert {(row["ranks"], row["dtype"], row["stage"]) for row in rows} == {
        (count, dtype, stage)
        for count in (1, 2) for dtype in ("fp32", "bf16") for stage in range(4)
    }
    for row in rows:
        assert row["measured"] == pytest.approx(row["formula"], rel=0.1), row


def test_a_table_is_printed(finished):
    _, printed = finished
    for words in ("plain FSDP2", "bare PyTorch loop", "bytes per parameter", "commit"):
        assert words in printed


@ranks(2)
def test_contestants_that_train_differently_are_not_timed():
    count = dist.get_world_size()
    place = Environment(rank=dist.get_rank(), world_size=count)
    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("data",))
    own = Ranks(environment=place, device=torch.device("cpu"), mesh=mesh, store=None)
    setting = Setting(shape=tuple(TINY.items()), ranks=own)
    feeds = Feeds(setting, rounds=1)
    right, wrong = (fsdp2(setting, name, feeds.new()) for name in ("right", "wrong"))
    wrong.optimizer.param_groups[0]["lr"] *= 1.01
    with pytest.raises(Disagreement, match="wrong and right do not train alike: update"):
        verify([right, wrong], setting)
    late = feeds.new()
    next(late)  # other micro-batches than the rest
    contestants = [fsdp2(setting, "right", feeds.new()), zeropp_loop(setting, "late", late)]
    with pytest.raises(Disagreement, match="late and right do not train alike: loss"):
        verify(contestants, setting)


def test_storages_are_counted_once_and_none_is_overlooked():
    gc.collect()  # or what other tests left goes in between
    before = sum(live_storages().values())
    hidden = torch.zeros(1000, requires_grad=True)
    views = [hidden[:10], hidden.view(10, 100)]
    hidden.sum().backward()  # a gradient of as many elements
    with FakeTensorMode():
        fake = torch.zeros(1000)
    assert sum(live_storages().values()) - before == 8000
    del views, fake


@pytest.mark.parametrize("count", [2, 4, 64])
def test_formula_is_the_papers_but_for_what_the_engine_keeps_twice(count):
    extra = {"bf16": (2, 2, 2 / count, 0), "fp32": (4, 4 / count, 4 / count, 0)}
    for dtype, differences in extra.items():
        for stage, difference in enumerate(differences):
            found = formula(stage, count, dtype) - paper(stage, count, dtype)
            assert found == pytest.approx(difference)
