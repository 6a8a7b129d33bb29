"""Which parameters learn at a rate of their own, and which decay."""

import pytest
import torch

from megatron_zpp.train.inputs import TRAIN
from megatron_zpp.train.run import Run
from tests.megatron_zpp.train.training_runs import built_run
from tests.ranks import ranks
from zeropp.optim.step_or_skip import local_part

FLAGS = "--mock-data --micro-batch-size 2 --train-iters 4 --weight-decay 0.1 "
ENDS = {"tokens.weight", "head.weight"}


def changed_by_a_step(run: Run) -> set[str]:
    """The names of the parameters of which this rank's part changes in a step."""
    parameters = dict(run.trainer.sharding.model.named_parameters())
    before = {name: local_part(each.detach()).clone() for name, each in parameters.items()}
    with run.batches.loader(TRAIN, 0) as batches:
        run.trainer.step(batches).result()
    return {
        name for name, each in parameters.items()
        if not torch.equal(before[name], local_part(each.detach()))
    }  # fmt: skip


@pytest.mark.parametrize("flags", ["", "--untie-embeddings-and-output-weights"])
@ranks(1, timeout=120)
def test_at_a_rate_of_zero_only_the_ends_stay(flags: str) -> None:
    with built_run(FLAGS + flags) as usual, built_run(FLAGS + flags + " --decoupled-lr 0") as still:
        names = {name for name, _ in usual.trainer.sharding.model.named_parameters()}
        assert changed_by_a_step(usual) == names
        assert changed_by_a_step(still) == names - ENDS


@pytest.mark.parametrize("flags", ["--zero-stage 3", "--pipeline-model-parallel-size 2"])
@ranks(2, timeout=120)
def test_on_several_ranks_too(flags: str) -> None:
    flags = f"{FLAGS} --global-batch-size 4 {flags} --untie-embeddings-and-output-weights "
    with built_run(flags + "--decoupled-lr 0") as still:
        assert not changed_by_a_step(still) & ENDS


@ranks(1, timeout=120)
def test_the_same_rate_as_the_others_changes_nothing() -> None:
    rates = "--lr 1e-2 --min-lr 1e-3 "
    with (
        built_run(FLAGS + rates) as usual,
        built_run(FLAGS + rates + "--decoupled-lr 1e-2") as same,
    ):
        for each in (usual, same):
            changed_by_a_step(each)
        models = (each.trainer.sharding.model.parameters() for each in (usual, same))
        pairs = zip(*models, strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        groups = [each.trainer.optimizer.param_groups for each in (same, usual)]
        assert list(map(len, groups)) == [3, 2]


@pytest.mark.parametrize("heads", ["", "--qk-layernorm-across-heads --normalization RMSNorm "])
@ranks(1)
def test_gains_of_queries_and_keys_decay_where_the_flag_says_so(heads: str) -> None:
    flags = FLAGS + "--qk-layernorm " + heads
    with built_run(flags) as usual, built_run(flags + "--apply-wd-to-qk-layernorm") as decaying:
        others = decay_by_name(decaying)
        for name, decays in decay_by_name(usual).items():
            assert not decays or ".weight" in name
            is_qk_norm = any(part in name for part in ("q_norm", "k_norm", "ies_norm", "keys_norm"))
            assert others[name] == (decays or is_qk_norm), name
        assert sum(others.values()) > sum(decay_by_name(usual).values())


def decay_by_name(run: Run) -> dict[str, bool]:
    decays = {
        id(each): group["decays"]
        for group in run.trainer.optimizer.param_groups
        for each in group["params"]
    }
    return {name: decays[id(each)] for name, each in run.trainer.sharding.model.named_parameters()}
