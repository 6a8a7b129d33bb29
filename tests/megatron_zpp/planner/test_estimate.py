"""What --dry-run says of ranks that are not there: shares, sums over nodes, what is offloaded."""

import json
from collections import Counter

import pytest

from benchmarks.memory.dry_run import VOCABULARY
from megatron_zpp.planner.parts.planned_run import plan_run
from megatron_zpp.planner.run_forecast import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    MOMENTS,
    SAVED_COPY,
    WEIGHTS,
    RunForecast,
)
from megatron_zpp.settings.arguments import parse
from tests.megatron_zpp.parallel.flags import CP2, PP2, PP4, SP, TP2, TWO_STAGES
from zeropp.errors import InputError
from zeropp.wire.rank_group import Nodes

MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --hidden-dropout 0 "
    "--attention-dropout 0 --bf16 --mock-data --lr 1 --train-iters 1 "
)
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --num-query-groups 2 "
)
MOE = (
    "--swiglu --disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 "
    "--moe-layer-freq [0,1,1,1] "
)


def predict(flags, count=8, per_node=4):
    """The estimate of a small GPT on GPUs that are not there."""
    text = f"{MODEL}--micro-batch-size 1 --global-batch-size 48 {flags}"
    nodes = Nodes.of(range(count), min(count, per_node))
    return RunForecast.of(parse(text.split(), count), VOCABULARY, nodes, is_cpu=False)


def test_a_part_of_the_optimizer_on_the_host_is_counted_by_whole_parameters(tmp_path):
    """The embedding is a fifth of this model, and first. The rest is drawn on the device."""
    path = tmp_path / "zeropp.json"
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.15}}
    path.write_text(json.dumps({"zero_optimization": zero}))
    whole = predict("--zero-stage 2 --cpu-optimizer").host[MOMENTS]
    host = predict(f"--deepspeed-config {path}").host
    assert 0.1 < host[MOMENTS] / whole < 0.15
    assert sum(host.values()) == host[MOMENTS] / 8 * (18 + 4)  # 4: of later micro-batches


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
    half = """{"zero_optimization":{"stage":2},"data_types":{"grad_accum_dtype":"bf16"}}"""
    halved = predict(f"--deepspeed-config {half} --cpu-optimizer")
    assert halved.host[GRADIENTS] == offloaded.host[GRADIENTS] / 2
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
    assert whole.device[MOMENTS] < predict("--zero-stage 2", count=4).device[MOMENTS] / 1.9


def test_states_are_divided_by_all_axes():
    whole = predict("--zero-stage 0")
    for flags in (TP2 + SP, PP2, TP2 + PP2, CP2 + "--zero-stage 3"):
        split = predict(f"--zero-stage 1 {flags}" if "stage" not in flags else flags)
        parameters = split.device[WEIGHTS] / 4 * 8
        assert split.device[MOMENTS] == 2 * split.device[WEIGHTS]
        assert 0.99 <= parameters / (whole.device[WEIGHTS] / 4) < 1.35  # ends of pipelines, norms


def test_a_pipeline_holds_activations_of_as_many_micro_batches_as_it_has_ranks():
    alone = predict("--zero-stage 1 --num-layers 16").device[ACTIVATIONS]
    for size in (2, 4):
        flags = f"--zero-stage 1 --num-layers 16 --pipeline-model-parallel-size {size}"
        assert predict(flags).device[ACTIVATIONS] == pytest.approx(alone, rel=0.1)
    chunks = predict(f"--zero-stage 1 --num-layers 16 {PP4}{TWO_STAGES}")
    # 2 (P - 1) + (V - 1) P + 1 = 11 passes through half of a rank's layers, not 4 through all.
    assert chunks.device[ACTIVATIONS] / alone == pytest.approx(11 / 8, rel=0.12)


def test_sequences_and_their_activations_are_divided():
    whole = predict("--zero-stage 1").device[ACTIVATIONS]
    for flags in (CP2, TP2 + SP):
        assert predict(f"--zero-stage 1 {flags}").device[ACTIVATIONS] < 0.62 * whole
    assert 0.62 * whole < predict(f"--zero-stage 1 {TP2}").device[ACTIVATIONS] < whole


@pytest.mark.parametrize(("count", "per_node"), [(8, 4), (16, 8), (16, 4), (8, 1)])
@pytest.mark.parametrize("chunks", ["", TWO_STAGES])
def test_a_pipeline_over_nodes_sends_what_all_its_places_do(count, per_node, chunks):
    flags = "--num-layers 16 --pipeline-model-parallel-size 8 --zero-stage 1 " + chunks
    text = f"{MODEL}--micro-batch-size 2 --global-batch-size 32 {flags}"
    config = parse(text.split(), count)
    nodes = Nodes.of(range(count), per_node)
    total, forecast = Counter(), RunForecast.of(config, VOCABULARY, nodes, is_cpu=False)
    mean, first = forecast.sent, forecast.first
    for place in range(8):
        total.update(plan_run(first.model, first.ranks.at(place), is_cpu=False).sent_by_node())
    assert mean["pipeline", "across_nodes"] > 0
    assert mean == {key: pytest.approx(sent / 8) for key, sent in total.items()}


def test_stages_that_nodes_cannot_hold_alike_are_refused():
    with pytest.raises(InputError, match="the nodes would have 4, 2 of them"):
        predict("--zero-stage 1 --num-layers 6 --pipeline-model-parallel-size 2", 12, 4)
