"""Settings of nodes that step alone which meet others: each works, or is named."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.train.inputs import TRAIN
from megatron_zpp.train.run import Run
from tests.megatron_zpp.interchange.foreign_models import llama
from tests.megatron_zpp.train.finetuning import flags_for
from tests.megatron_zpp.train.training_runs import (
    built_run,
    log_of,
    losses,
    run_alone,
    shared_folder,
    with_json,
)
from tests.ranks import ranks
from tests.worlds import worlds
from zeropp import InputError
from zeropp.capabilities.local_sgd.outer_group import join_outer_group
from zeropp.ranks.topology import Environment

BATCH = "--micro-batch-size 1 --global-batch-size 2 --train-iters 4 "


def flags_of(zero: dict | None = None, **zeropp: object) -> str:
    return with_json(zero, **{"ranks_per_node": 1, "sync_every": 2, **zeropp})


def weights_of(run: Run) -> list[torch.Tensor]:
    return [each.clone() for each in run.ranks.replicas.steps.weights.read()]


@ranks(2)
def test_a_node_that_skips_a_step_in_fp16_exchanges_with_the_others(tmp_path: Path) -> None:
    folder = shared_folder(str(tmp_path))
    flags = f"{BATCH}{flags_of()} --fp16 --initial-loss-scale 64 "
    with worlds(1, folder) as outer, built_run(flags, outer) as run:
        if outer.node == 1:
            run.trainer.scaler.scale = 2.0**40
        before = weights_of(run)
        with run.batches.loader(TRAIN, 0, ()) as batches:
            run.trainer.step(batches).result()
            moved = not all(map(torch.equal, before, weights_of(run)))
            assert moved == (outer.node == 0)
            run.trainer.step(batches).result()
        skipped = outer.gather(run.trainer.counters.skipped_iterations)
        assert skipped[0] == 0 < skipped[1]
        ours, theirs = outer.gather([each.tolist() for each in weights_of(run)])
        assert ours == theirs != [each.tolist() for each in before]


def test_only_adapters_are_exchanged_and_a_stop_loses_no_digit(tmp_path: Path) -> None:
    flags = flags_for(llama(), tmp_path / "model") + flags_of(sync_every=3)
    flags += f"--lora-dropout 0.1 --save {tmp_path / 'saved'} --save-interval 2 "
    straight = losses(run_alone(2, 1, flags, tmp_path))
    second = run_alone(2, 1, f"{flags} --load {tmp_path / 'saved'} --ckpt-step 2", tmp_path)
    assert losses(second) == straight[2:] != []
    require_agreed_adapters(flags=flags, folder=tmp_path)


@ranks(2)
def require_agreed_adapters(flags: str, folder: Path) -> None:
    """Require that nodes agree on adapters alone."""
    with worlds(1, folder) as outer, built_run(flags, outer) as run:
        model, (fragment,) = run.trainer.sharding.model, run.ranks.replicas.steps.fragments
        agreed = fragment.agreed
        num_trained = sum(map(len, agreed))
        assert 0 < num_trained == model.num_parameters(trained_only=True) < model.num_parameters()


def test_settings_for_messages_between_nodes_are_one_line(tmp_path: Path) -> None:
    zero = {
        "stage": 3,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": 2,
    }
    json_flags = flags_of(zero, ranks_per_node=2, weight_steps=True)
    batch = "--micro-batch-size 1 --global-batch-size 4 --train-iters 2 "
    log = run_alone(4, 2, batch + json_flags, tmp_path)
    assert (
        "nodes step alone, and nothing of a step crosses them: zero_hpz_partition_size, "
        "zeropp.weight_steps without effect; zero_quantized_weights, zero_quantized_gradients only "
        "between the ranks of a node"
    ) in " ".join(log.split())


@ranks(2)
def test_experts_over_nodes_that_step_alone_are_refused(tmp_path: Path) -> None:
    folder = shared_folder(str(tmp_path))
    flags = f"{BATCH}{flags_of({'stage': 1})}"
    flags += "--num-experts 2 --expert-model-parallel-size 2"
    problem = "size 2 does not divide the 1 ranks that share the layers in a node, which zeropp.sy"
    with worlds(1, folder) as outer, pytest.raises(InputError, match=problem):
        log_of(flags, outer=outer)


def test_a_single_node_is_refused() -> None:
    place = Environment(rank=0, world_size=2, local_rank=0, local_world_size=2)
    with pytest.raises(InputError, match="there is only one, of 2 ranks: start several"):
        join_outer_group(dist.HashStore(), place, place.within(2), timedelta(seconds=5))
