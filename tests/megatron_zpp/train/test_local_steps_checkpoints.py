"""Checkpoints of nodes that step alone, on other nodes, with parts missing, and read by tools."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.checkpoint.checkpoint_weights import CheckpointWeights
from megatron_zpp.checkpoint.iteration_folders import POINTER, complete_iterations
from megatron_zpp.checkpoint.manifest import read_manifest, write_manifest
from megatron_zpp.checkpoint.training_state import STATE
from megatron_zpp.train.run import Run
from tests.megatron_zpp.train.training_runs import (
    RELATIVE,
    built_run,
    log_of,
    losses,
    run,
    run_alone,
    shared_folder,
    tensors_of,
    with_json,
)
from tests.ranks import ranks
from tests.worlds import elastic_nodes, worlds
from zeropp import InputError
from zeropp.checkpoint.checksums import file_entry

MODEL = "--global-batch-size 4 --train-iters 7 --hidden-dropout 0 "
MODEL += "--attention-dropout 0 --override-opt_param-scheduler --num-experts 4 "
MODEL += "--moe-ffn-hidden-size 12 --moe-router-score-function sigmoid "
MODEL += "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.03 "
MIDDLE, LAST = "iter_0000006", "iter_0000007"
OTHER_SHAPE = "--use-checkpoint-args --num-layers 3 "


def flags_of(
    ranks_per_node: int = 1,
    micro: int = 2,
    elastic: Mapping[str, object] = MappingProxyType({}),
    **zero: object,
) -> str:
    """Flags of nodes that exchange after iterations 4 and 7."""
    zeropp = {"ranks_per_node": ranks_per_node, "sync_every": 4, **elastic}
    return f"{MODEL} --micro-batch-size {micro} {with_json(zero, **zeropp)} "


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run`, of two nodes: iteration 6, in an interval, and 7; and their log."""
    folder = tmp_path_factory.mktemp("nodes")
    saving = f"--save {folder / 'run'} --save-interval 2 --keep-checkpoints 1"
    run_alone(2, 1, flags_of() + saving, folder)
    return folder


def means(folder: Path, name: str) -> dict[str, Tensor]:
    """The means of the weights that the nodes have saved."""
    mean = CheckpointWeights(folder / name)
    return {each: mean.read(each) for each in mean.facts()}


def require_means(run: Run, folder: Path, name: str = MIDDLE) -> None:
    """Require weights that are the means of those of iteration 6, or of another one."""
    expected = means(folder / "run", name)
    for name, weight in tensors_of(run).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=0)


def test_the_nodes_keep_one_checkpoint_more_and_differ_in_an_interval(saved: Path) -> None:
    for node in (saved / "run", saved / "run/node_1"):
        assert complete_iterations(node) == [6, 7]
    own, other = (
        CheckpointWeights(_alone(saved / "run" / node / MIDDLE, saved / f"alone{number}"))
        for number, node in enumerate(("", "node_1"))
    )
    mean = CheckpointWeights(saved / "run" / MIDDLE)
    differing = []
    for name in mean.facts():
        expected = (own.read(name).double() + other.read(name).double()) / 2
        torch.testing.assert_close(mean.read(name), expected.float(), rtol=0, atol=0)
        if not torch.equal(own.read(name), other.read(name)):
            differing.append(name)
    assert len(differing) > 5 and any(name.endswith("expert_bias") for name in differing)
    last = CheckpointWeights(saved / "run" / LAST)
    alone = CheckpointWeights(_alone(saved / "run" / LAST, saved / "alone2"))
    assert all(torch.equal(last.read(name), alone.read(name)) for name in last.facts())


def _alone(checkpoint: Path, folder: Path) -> Path:
    """A copy of a node's checkpoint without those of the other nodes."""
    return Path(shutil.copytree(checkpoint, folder / checkpoint.name))


@pytest.mark.parametrize("left", [None, "of an earlier run"])
def test_tools_say_whose_weights_they_take_if_a_node_is_missing(left, saved, tmp_path, caplog):
    checkpoint = _alone(saved / "run" / MIDDLE, tmp_path)
    if left:
        shutil.copytree(saved / "run/node_1" / MIDDLE, tmp_path / "node_1" / MIDDLE)
        let_another_launch_have_saved(tmp_path / "node_1" / MIDDLE)
    CheckpointWeights(checkpoint)
    assert "of one of 2 independent replicas, and its weights are taken alone" in caplog.text


def test_more_nodes_go_on_with_the_mean_and_fewer_with_theirs(saved: Path, tmp_path: Path) -> None:
    """Two nodes, then four, which end within an interval, then two."""
    longer = flags_of(micro=1) + "--train-iters 9 --exit-interval 7 "
    longer += f"--load {saved / 'run'} --ckpt-step 6 --save {tmp_path / 'run'}"
    assert len(losses(run_alone(4, 1, longer, tmp_path))) == 1
    require_means_of(saved=saved, name=MIDDLE, world=1, folder=tmp_path)
    require_means_of(saved=tmp_path, name=LAST, world=2, folder=tmp_path)


@ranks(4)
def require_means_of(saved: Path, name: str, world: int, folder: Path) -> None:
    """Require that nodes of `world` ranks begin with the means of those of a checkpoint."""
    flags = flags_of(world, micro=1)
    flags += f"--load {saved / 'run'} --ckpt-step {int(name[-1])}"
    with worlds(world, folder) as outer, built_run(flags, outer) as built:
        require_means(built, saved, name)


@pytest.mark.parametrize("flag", ["--no-load-optim", "--finetune"])
@ranks(2)
def test_as_many_nodes_without_moments_go_on_with_the_mean(flag, saved, tmp_path):
    folder = shared_folder(str(tmp_path))
    flags = flags_of()
    flags += f"--load {saved / 'run'} --ckpt-step 6 {flag}"
    with worlds(1, folder) as outer, built_run(flags, outer) as built:
        require_means(built, saved)
        for each in built.ranks.replicas.steps.fragments:
            assert all(map(torch.equal, each.agreed, each.weights.read()))
            assert not each.momentum.any()


@pytest.mark.parametrize("flag", ["--no-load-optim", "--finetune"])
@ranks(2)
def test_nodes_that_come_and_go_begin_alike_without_moments(flag, saved, tmp_path):
    folder = shared_folder(str(tmp_path))
    elastic = {"sync_store": "localhost:1", "sync_nodes": 2}
    flags = flags_of(elastic=elastic)
    flags += f"--load {saved / 'run'} --ckpt-step 6 {OTHER_SHAPE} {flag}"
    iteration = 0 if flag == "--finetune" else 6
    with elastic_nodes(folder, iteration) as outer, built_run(flags, outer) as built:
        assert built.trainer.counters.iteration == iteration
        steps, weights = built.ranks.replicas.steps, tensors_of(built)
        values = [each.sum().item() for each in weights.values()]
        assert steps.sum(lambda place, size: values) == [2 * each for each in values]
        if flag == "--finetune":
            require_means(built, saved)
        for each in steps.fragments:
            assert all(map(torch.equal, each.agreed, each.weights.read()))
            assert not each.momentum.any()


@ranks(2)
def test_nodes_that_come_without_a_checkpoint_know_the_shape(saved: Path, tmp_path: Path) -> None:
    folder = shared_folder(str(tmp_path))
    elastic = {"sync_store": "localhost:1", "sync_nodes": 2}
    flags = flags_of(elastic=elastic) + OTHER_SHAPE
    if dist.get_rank() == 0:
        shutil.copytree(saved / "run", folder / "run", ignore=shutil.ignore_patterns("node_1"))
    dist.barrier()
    flags += f" --load {folder / 'run'}"
    with elastic_nodes(folder, 0) as outer:
        with built_run(flags, outer) as built:
            assert built.config.model.num_layers == 2
        with pytest.raises(InputError, match="--ckpt-step or --exit-on-missing-checkpoint needs"):
            log_of(f"{flags} --exit-on-missing-checkpoint", outer=outer)


@ranks(2)
def test_nodes_that_begin_with_other_weights_are_found_at_their_first_exchange(tmp_path):
    folder, rank = shared_folder(str(tmp_path)), dist.get_rank()
    flags = flags_of() + f"--seed {rank + 1}"
    with worlds(1, folder) as outer, built_run(flags, outer) as built:
        with pytest.raises(InputError, match="begin with the same weights"):
            built.ranks.replicas.steps.after_update(1, is_last=True)


@pytest.mark.parametrize("stage", [0, 3])
def test_nodes_of_other_ranks_go_on_each_with_its_own(stage, saved, tmp_path):
    flags = flags_of(2, 1, stage=stage)
    log = run_alone(4, 2, f"{flags} --load {saved / 'run'} --ckpt-step 6", tmp_path)
    (loss,) = map(float, losses(log))
    straight = losses((saved / "log.txt").read_text())
    assert loss == pytest.approx(float(straight[-1]), rel=RELATIVE)
    assert "outer momentum is reset" in log


@pytest.mark.parametrize(
    ("saving", "left"), [("", None), ("--async-save", None), ("", "of an earlier run")]
)
def test_a_node_that_died_before_it_published_has_the_iteration_before(
    saving: str, left: str | None, saved: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved / "run", tmp_path / "run"))
    if left is None:
        shutil.rmtree(folder / "node_1" / LAST)
        (folder / "node_1" / POINTER).write_text("6")
    else:
        let_another_launch_have_saved(folder / "node_1" / LAST)
    flags = flags_of() + f"--load {folder} --save {folder} {saving}"
    log = run_alone(2, 1, flags, tmp_path)
    assert losses(log) == losses((saved / "log.txt").read_text())[-1:]
    assert complete_iterations(folder / "node_1") == [6, 7]


@ranks(2)
def test_a_node_without_a_checkpoint_is_named(saved: Path, tmp_path: Path) -> None:
    folder = shared_folder(str(tmp_path))
    flags = flags_of() + f"--load {folder / 'run'}"
    if dist.get_rank() == 0:
        shutil.copytree(saved / "run", folder / "run")
        shutil.rmtree(folder / "run/node_1")
    dist.barrier()
    with worlds(1, folder) as outer:
        with pytest.raises(InputError, match="replica 1 of 2 has no checkpoint of"):
            log_of(flags, outer=outer)


@ranks(1)
def test_nodes_that_did_not_save_together_are_not_averaged(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "run", tmp_path / "run")
    let_another_launch_have_saved(tmp_path / "run/node_1" / LAST)
    loading = f"{MODEL} --micro-batch-size 2 --load {tmp_path / 'run'}"
    with built_run(loading) as built:
        require_means(built, saved)
        assert built.trainer.counters.iteration == 6
    with pytest.raises(InputError, match="no checkpoint of an iteration 7 that all nodes have sav"):
        log_of(f"{loading} --ckpt-step 7")


def let_another_launch_have_saved(checkpoint: Path) -> None:
    """Let a checkpoint be one that an earlier run has left."""
    entries, state = dict(read_manifest(checkpoint)), checkpoint / STATE
    state.write_text(json.dumps(json.loads(state.read_text()) | {"launch": "another"}))
    write_manifest(checkpoint, entries | {STATE: file_entry(state)})


@ranks(1)
def test_a_missing_node_is_named_by_a_run_on_other_nodes(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/node_1")
    with pytest.raises(InputError, match="run/node_1 has no complete checkpoint: restore it"):
        log_of(f"{MODEL} --micro-batch-size 2 --load {tmp_path / 'run'}")


def test_one_node_s_checkpoint_is_the_beginning_of_several(tmp_path: Path) -> None:
    run(1, f"{MODEL} --micro-batch-size 2 --save {tmp_path / 'one'} --exit-interval 3", tmp_path)
    require_same_beginning(folder=tmp_path)


@ranks(2)
def require_same_beginning(folder: Path) -> None:
    flags = flags_of() + f"--load {folder / 'one'} {OTHER_SHAPE}"
    with worlds(1, folder) as outer:
        for more, iteration in ((" --ckpt-step 3", 3), (" --finetune", 0)):
            with built_run(flags + more, outer) as built:
                assert built.trainer.counters.iteration == iteration
                values = outer.gather([each.sum().item() for each in tensors_of(built).values()])
                assert values[0] == values[1]
