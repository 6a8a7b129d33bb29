"""What --dry-run predicts is what the fullest moment of real steps holds."""

import json

import pytest
import torch.distributed as dist

from benchmarks.memory.dry_run import VOCABULARY
from megatron_zpp.planner.estimate import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    MOMENTS,
    SAVED_COPY,
    WEIGHTS,
    estimate,
)
from megatron_zpp.settings.arguments import parse
from tests.megatron_zpp.interchange.family_flags import FLAGS
from tests.megatron_zpp.planner.peaks import assert_peak_is_foretold
from tests.ranks import ranks
from zeropp.wire.rank_group import Nodes

MODEL = (
    "--num-layers 3 --hidden-size 128 --num-attention-heads 4 --seq-length 32 --hidden-dropout 0 "
    "--attention-dropout 0 --micro-batch-size 2 "
)
BF16 = {"bf16": {"enabled": True}}
PLUS = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


@ranks(4)
def test_the_fullest_moment_is_foretold():
    flags = "--zero-stage 3 --bf16 --global-batch-size 16 --recompute-granularity full"
    assert_peak_is_foretold(MODEL + flags)


@pytest.mark.parametrize(
    "flags",
    [
        "--zero-stage 0 --bf16 --global-batch-size 8",
        "--zero-stage 2 --bf16 --global-batch-size 4 --cpu-optimizer",
        "--zero-stage 1 --global-batch-size 8 --recompute-granularity selective",
        "--zero-stage 3 --global-batch-size 4 --swiglu --position-embedding-type rope",
        f"--zero-stage 3 --global-batch-size 4 {FLAGS['olmo2']}",
        f"--zero-stage 3 --global-batch-size 4 {FLAGS['gemma2']}",
        f"--zero-stage 3 --global-batch-size 4 {FLAGS['bloom']}",
    ],
)
@ranks(2)
def test_on_two_ranks_and_with_other_models(flags):
    assert_peak_is_foretold(MODEL + flags)


@ranks(1)
def test_one_rank_in_fp32_has_no_engine_and_offloads_too():
    for flags in ("--global-batch-size 6", "--zero-stage 2 --cpu-optimizer --global-batch-size 4"):
        assert_peak_is_foretold(MODEL + flags)


@pytest.mark.parametrize(("once", "batch"), [(False, 8), (True, 24)])
@ranks(4, ranks_per_node=2)
def test_zeropp_too_with_the_copies_of_a_node(once, batch, tmp_path):
    path = tmp_path / f"{dist.get_rank()}.json"
    zero = {"stage": 3, **PLUS, "zero_hpz_partition_size": 2}
    settings = BF16 | {"zeropp": {"reduce_gradients_once": once}}
    path.write_text(json.dumps({"zero_optimization": zero} | settings))
    assert_peak_is_foretold(f"{MODEL}--global-batch-size {batch} --deepspeed-config {path}")


@ranks(2)
def test_an_update_beside_the_next_step_has_its_own_gradients_and_copies(tmp_path):
    path = tmp_path / f"{dist.get_rank()}.json"
    late = {"delayed_param_update": True, "delayed_param_update_warmup": 0}
    for settings, ratio in (({}, 1.0), (BF16, 1.0), ({}, 0.4), (BF16, 0.0)):
        zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
        path.write_text(json.dumps({"zero_optimization": zero, "zeropp": late} | settings))
        assert_peak_is_foretold(f"{MODEL}--global-batch-size 8 --deepspeed-config {path}")


@ranks(1)
def test_one_rank_in_fp32_with_its_weights_on_the_host():
    flags = "--zero-stage 3 --cpu-optimizer --remote-device cpu --global-batch-size 6"
    assert_peak_is_foretold(MODEL + flags)


LORA = "--lora-rank 4 --pretrained-checkpoint m --global-batch-size"
STORED = {"stage": 3, "zero_quantized_nontrainable_weights": True}


@pytest.mark.parametrize(
    ("zero", "more"),
    [
        ({"stage": 2}, {}),
        (STORED | {"stage": 1}, {"zeropp": {"nontrainable_weight_bits": 4}}),
        (STORED | {"offload_optimizer": {"device": "cpu"}}, BF16),
    ],
    ids=["numbers", "INT4", "offloaded"],
)
@ranks(2)
def test_adapters_beside_frozen_weights(zero, more, tmp_path):
    path = tmp_path / f"{dist.get_rank()}.json"
    path.write_text(json.dumps({"zero_optimization": zero} | more))
    assert_peak_is_foretold(f"{MODEL}{LORA} 8 --deepspeed-config {path}")


@ranks(4, ranks_per_node=2)
def test_adapters_beside_the_codes_that_a_node_keeps(tmp_path):
    path = tmp_path / f"{dist.get_rank()}.json"
    zero = STORED | {"zero_hpz_partition_size": 2}
    path.write_text(json.dumps({"zero_optimization": zero} | BF16))
    assert_peak_is_foretold(f"{MODEL}{LORA} 16 --deepspeed-config {path}")


@ranks(1)
def test_frozen_weights_become_codes_one_after_the_other(tmp_path):
    """All of them as numbers would be more than a step takes, where little is computed."""
    path = tmp_path / "zeropp.json"
    path.write_text(json.dumps({"zero_optimization": STORED} | BF16))
    predicted = assert_peak_is_foretold(f"{MODEL}{LORA} 2 --deepspeed-config {path}")
    assert predicted.host[WEIGHTS] < 2 * predicted.run.model.whole.num_parameters()


def test_a_part_of_the_optimizer_on_the_host_is_counted_by_whole_parameters(tmp_path):
    """The embedding is a fifth of this model, and first. All weights are drawn on the host."""
    path = tmp_path / "zeropp.json"
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.15}}
    path.write_text(json.dumps({"zero_optimization": zero}))
    whole = predict("--zero-stage 2 --cpu-optimizer").host[MOMENTS]
    host = predict(f"--deepspeed-config {path}").host
    assert 0.1 < host[MOMENTS] / whole < 0.15
    assert sum(host.values()) == whole / 2  # 4 bytes of 8


def test_an_asynchronous_save_needs_a_copy_on_the_host():
    saving = "--zero-stage 2 --save folder "
    assert SAVED_COPY not in predict(saving).host
    copied = predict(saving + "--async-save")
    assert copied.host == {SAVED_COPY: copied.device[WEIGHTS] + copied.device[MOMENTS]}
    weights = predict(saving + "--async-save --no-save-optim")
    assert weights.host == {SAVED_COPY: copied.device[WEIGHTS]}


def test_on_a_gpu_what_is_offloaded_is_on_the_host():
    plain, offloaded = predict("--zero-stage 2"), predict("--zero-stage 2 --cpu-optimizer")
    assert not plain.host_bytes
    assert offloaded.host[MOMENTS] == plain.device[MOMENTS]
    assert MOMENTS not in offloaded.device
    assert offloaded.device[WEIGHTS] == plain.device[WEIGHTS] // 2
    assert offloaded.device_bytes < plain.device_bytes
    pinned = predict("--zero-stage 2 --cpu-optimizer --use-pin-memory")
    assert pinned.host[MOMENTS] == offloaded.host[MOMENTS]  # made later, pageable
    assert 1 < pinned.host[GRADIENTS] / offloaded.host[GRADIENTS] < 2
    away = predict("--zero-stage 3 --cpu-optimizer --remote-device cpu")
    assert not away.device.get(WEIGHTS) and not away.device.get(GRADIENTS)


def test_on_a_gpu_weights_that_are_offloaded_are_filled_on_the_host():
    deep = "--num-layers 60 --zero-stage 3 --cpu-optimizer"
    assert not predict(f"{deep} --remote-device cpu", count=1).device.get(WEIGHTS)
    stays, whole = predict(deep, count=1).device, predict("--num-layers 60 --zero-stage 3", 1)
    assert stays[WEIGHTS] == whole.device[WEIGHTS] // 2


def test_more_ranks_recomputing_and_stage_3_take_less():
    whole = predict("--zero-stage 2")
    assert (
        predict("--zero-stage 2 --recompute-granularity full").device[ACTIVATIONS]
        < whole.device[ACTIVATIONS]
    )
    assert predict("--zero-stage 3").device[GATHERED] < whole.device[GATHERED] / 2
    assert predict("--zero-stage 2", count=8).device[MOMENTS] < whole.device[MOMENTS] / 1.9


def predict(flags, count=4):
    """The estimate of a small GPT on GPUs that are not there."""
    text = f"{MODEL}--bf16 --mock-data --lr 1 --train-iters 1 --global-batch-size 32 {flags}"
    config = parse(text.replace("--micro-batch-size 2", "--micro-batch-size 1").split(), count)
    nodes = Nodes(num_ranks=count, ranks_per_node=count)
    return estimate(config, VOCABULARY, nodes, is_cpu=False)
