"""The benchmark of the training step: what it reports, what it refuses, and what it counts."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.training_setup import TrainingSetup
from benchmarks.step.step_verification import VERIFIED_STEPS, verify
from benchmarks.step.training_loops import fsdp2, sharded
from megatron_zpp.parallel.mesh import Ranks
from tests.benchmarks.started import run_benchmark
from tests.ranks import ranks
from zeropp.ranks.topology import Environment

TINY = {
    "layers": 1,
    "hidden": 32,
    "heads": 2,
    "seq": 16,
    "vocab": 100,
    "micro-batch": 1,
    "micro-batches": 2,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[dict, str]:
    path = tmp_path_factory.mktemp("benchmark") / "result.json"
    shape = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    flags = f"--rounds 1 --ranks 2 --memory-ranks 2 --json {path}"
    done = run_benchmark("step.train_step", *shape, *flags.split())
    return json.loads(path.read_text()), done.stdout


def test_every_comparison_is_verified_and_timed(finished):
    result, _ = finished
    names = [comparison["name"] for comparison in result["comparisons"]]
    kinds = ("2 ranks, stage 3", "2 ranks, ZeRO++")
    of_ranks = [f"{kind}, {dtype}" for kind in kinds for dtype in ("fp32", "bf16")]
    assert names == ["one rank, fp32", *of_ranks]
    for comparison in result["comparisons"]:
        verified = comparison["verified"]
        for what, allowed in verified["allowed"].items():
            assert 0 <= verified["differences"][what] <= allowed
        first, *others = comparison["loops"]
        assert first["name"] == comparison["reference"] and first["ratio"] == 1
        last = "zeropp.attach" if "ZeRO++" in comparison["name"] else "ours"
        assert others[-1]["name"] == last
        for loop in others:
            assert loop["ratio"] == pytest.approx(loop["median"] / first["median"])
            assert len(loop["seconds"]) == result["rounds"] and min(loop["seconds"]) > 0


def test_command_and_machine_are_recorded(finished):
    result, _ = finished
    assert result["command"].startswith("python -m benchmarks.step.train_step --layers 1")
    assert result["versions"]["torch"] == torch.__version__
    assert result["machine"]["cores"] > 0
    assert result["shape"] == TINY


def test_memory_is_within_a_tenth_of_the_formula(finished):
    rows = finished[0]["memory"]
    assert {(row["ranks"], row["dtype"], row["stage"]) for row in rows} == {
        (2, dtype, stage) for dtype in ("fp32", "bf16") for stage in range(4)
    }
    for row in rows:
        assert row["measured"] == pytest.approx(row["formula"], rel=0.1), row


def test_a_table_is_printed(finished):
    _, printed = finished
    for words in ("plain FSDP2", "bare PyTorch loop", "bytes per parameter", "commit"):
        assert words in printed


@ranks(2)
def test_loops_that_train_differently_are_not_timed():
    count = dist.get_world_size()
    place = Environment(rank=dist.get_rank(), world_size=count)
    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("data",))
    own = Ranks(environment=place, device=torch.device("cpu"), mesh=mesh, store=None)
    setup = TrainingSetup(shape=TINY, ranks=own)
    steps = setup.steps(VERIFIED_STEPS + 1)
    right, wrong = (fsdp2(setup, name, iter(steps)) for name in ("right", "wrong"))
    wrong.optimizer.param_groups[0]["lr"] *= 1.01
    with pytest.raises(Disagreement, match="wrong and right do not train alike: update"):
        verify([right, wrong], setup)
    late_steps = iter(steps[1:])  # other micro-batches than the rest
    loops = [fsdp2(setup, "right", iter(steps)), sharded(setup, "late", late_steps)]
    with pytest.raises(Disagreement, match="late and right do not train alike: loss"):
        verify(loops, setup)
