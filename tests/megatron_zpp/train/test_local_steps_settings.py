"""Settings of nodes that step alone which meet others, and what the nodes send, by formula too."""

import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.monitor.communication import Communication
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
LONG_BATCH = "--micro-batch-size 1 --global-batch-size 4 --log-interval 100 "
OUTER = "outer", "across_nodes"


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
        "replicas train independently, no step crosses nodes: zero_hpz_partition_size, "
        "zeropp.weight_steps without effect; zero_quantized_weights, zero_quantized_gradients only "
        "between the ranks of a node"
    ) in " ".join(log.split())


@ranks(2)
def test_experts_over_nodes_that_step_alone_are_refused(tmp_path: Path) -> None:
    folder = shared_folder(str(tmp_path))
    flags = f"{BATCH}{flags_of({'stage': 1})}"
    flags += "--num-experts 2 --expert-model-parallel-size 2"
    problem = "size 2 does not divide the 1 ranks that share the layers"
    with worlds(1, folder) as outer, pytest.raises(InputError, match=problem):
        log_of(flags, outer=outer)


def test_a_single_node_is_refused() -> None:
    place = Environment(rank=0, world_size=2, local_rank=0, local_world_size=2)
    with pytest.raises(InputError, match="there is only one, of 2 ranks: start several"):
        join_outer_group(dist.HashStore(), place, place.within(2), timedelta(seconds=5))


def steps(run: Run, number: int) -> Communication:
    """Train for some steps, and return what a node has sent."""
    with run.batches.loader(TRAIN, 0, ()) as batches:
        for _ in range(number):
            run.trainer.step(batches).result()
    return run.trainer.communication.take()


def flags_at(stage: int, **zeropp: object) -> str:
    return LONG_BATCH + with_json({"stage": stage}, ranks_per_node=2, **zeropp)


@pytest.mark.parametrize(("bits", "stage"), [(32, 3), (8, 1), (4, 0)])
@ranks(4, timeout=120)
def test_an_exchange_is_counted_once_for_the_steps_before_it(bits, stage, tmp_path):
    zeropp = {"sync_every": 3, "sync_bits": bits}
    flags = flags_at(stage, **zeropp) + "--train-iters 7"
    with worlds(2, shared_folder(str(tmp_path))) as outer, built_run(flags, outer) as run:
        taken, trained = steps(run, 6), run.trainer.sharding.model.num_parameters()
        rank = dist.get_rank() + 2 * outer.node
    sent, expected = taken.sent[OUTER], taken.expected[OUTER]
    assert taken.sent["outer", "in_node"] == 0
    # Twice, half of all weights go to the other node, and half come back.
    per_weight = {32: 4, 8: 1 + 2 / 256, 4: 0.5 + 2 / 128}[bits]
    assert expected == pytest.approx(2 * trained * per_weight, rel=0.05), rank  # padding
    if bits == 32:
        assert sent == pytest.approx(expected, rel=1e-12)
    else:
        assert 0 < sent != expected and sent < 1.02 * expected
    # Plain ZeRO's rings over all 4 ranks send 16 bit, here 32, in each of 6 steps.
    plain = sum(taken.plain[key] for key in taken.plain if key[1] == "across_nodes")
    collectives = {0: 0, 1: 2, 3: 3}[stage]
    if stage != 3:  # whose root is gathered once
        assert plain == pytest.approx(6 * collectives * 4 * trained * 3 / 4, rel=0.05)


def test_the_table_and_the_end_say_what_nodes_exchange(tmp_path: Path) -> None:
    zeropp = {"sync_every": {"0": 1, "2": 2}, "sync_on_host": True}
    flags = flags_at(1, **zeropp) + "--train-iters 4 --log-interval 2"
    log = run_alone(4, 2, flags, tmp_path)
    assert re.search(
        r"nodes +2 that train independently, synchronized every step, every 2 steps after step 2",
        log,
    )
    assert re.search(r"\n +outer +0\.\d+ +0\.00\n", log), log
    assert len(re.findall(r"\| outer: 0\.\d\d", log)) == 2
    assert re.search(r"plain ZeRO-1 +\S+ \S+ per node and step: \d", log)
