"""Pipelines whose ranks have unequal numbers of layers: which are compared, and what they take."""

from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_zpp.planner.candidates import TIE, SearchSpace
from megatron_zpp.planner.parts.planned_run import plan_run
from megatron_zpp.planner.run_forecast import RunForecast, rank_memory
from megatron_zpp.planner.search import Search
from megatron_zpp.planner.timing.balanced_stages import LayerSeconds, balanced_stages, stage_flags
from megatron_zpp.planner.timing.hardware import find_cluster
from megatron_zpp.settings.arguments import parse
from zeropp.wire.rank_group import Nodes

FLAGS = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --bf16 --zero-stage 1 "
    "--tokenizer-type NullTokenizer --vocab-size 255 --global-batch-size 16 "
    "--hidden-dropout 0 --attention-dropout 0 "
)
MOE = "--swiglu --disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 "
PP4 = "--pipeline-model-parallel-size 4 "
NODES = Nodes.of(range(8), 8)
VOCABULARY = 256


def config_of(num_layers, flags=""):
    return parse(f"--num-layers {num_layers} {FLAGS}{flags}".split(), 8)


def compared(num_layers, flags="", head=0.5, layers=None):
    """The layers of each rank of the pipelines that are compared without tensor ranks, by size."""
    config = config_of(num_layers, flags)
    seconds = LayerSeconds(layers=tuple(layers or [1.0] * num_layers), head=head)
    result = {}
    for parallel, _ in SearchSpace(base=config, nodes=NODES).all_parallel(seconds):
        size, words = parallel.pipeline_model_parallel_size, f"--num-layers {num_layers} {FLAGS}"
        if parallel.tensor_model_parallel_size > 1 or parallel.num_virtual_stages_per_pipeline_rank:
            continue
        if size > 1:  # the trainer reads the same from the flags that are printed
            words += f"--pipeline-model-parallel-size {size} "
            words += " ".join(f"{name} {value}" for name, value in stage_flags(parallel).items())
        taken = parse(words.split(), 8).parallel.stages(num_layers)
        assert taken == parallel.stages(num_layers)
        result.setdefault(size, []).append(list(map(len, taken)))
    return result


def test_ranks_that_do_not_divide_the_layers_are_compared_with_the_best_balance():
    by_size = compared(13)
    assert by_size[2] == [[7, 6]] and by_size[4] == [[3, 4, 4, 2]]  # the head is half a layer
    assert by_size[8] == [[1, 1, 1, 2, 2, 2, 2, 2]]  # no other way is as short
    assert compared(12, head=0.0) | {8: []} == {1: [[12]], 2: [[6, 6]], 4: [[3] * 4], 8: []}


def test_the_output_layer_counts_where_that_balances_better():
    assert compared(8, head=3.0)[2] == [[4, 4], [5, 3]]
    assert compared(8, head=3.0)[4] == [[2, 2, 2, 2], [3, 2, 2, 1]]
    light = [0.1] * 3 + [1.0] * 5
    assert compared(8, head=0.0, layers=light)[2] == [[4, 4], [5, 3]]


@pytest.mark.parametrize("seed", range(3))
def test_no_other_layers_of_the_ends_are_faster(seed):
    layers = [1.0 + (seed * each) % 3 for each in range(11)]
    seconds = LayerSeconds(layers=tuple(layers), head=2.0 * seed)
    parallel = config_of(11, "--decoder-first-pipeline-num-layers 5 " + PP4).parallel
    other = replace(parallel, pipeline_model_parallel_size=2)
    chosen = min(max(seconds.of_ranks(way)) for way in balanced_stages(parallel, other, seconds, 0))
    for middle in range(1, 5):
        for first in range(1, 11 - 2 * middle):
            ends = pairwise((0, first, first + middle, first + 2 * middle, 11))
            by_rank = [sum(layers[begin:end]) for begin, end in ends]
            by_rank[-1] += seconds.head
            assert chosen <= max(by_rank)


def test_what_flags_say_about_stages_is_taken_as_it_is():
    flags = PP4 + "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3 "
    by_size = compared(12, flags)
    assert by_size[4] == [[1, 4, 4, 3]] and by_size[2] == [[6, 6]]
    # The micro-batch of the flags, 4, does not divide the batch of 8 replicas, but others do.
    method = compared(13, PP4 + "--pp-partition-method type:transformer ")
    assert method == {1: [[13]], 2: [[6, 7]], 4: [[3, 3, 3, 4]], 8: [[1, 1, 1, 2, 2, 2, 2, 2]]}


def test_axes_that_the_trainer_refuses_are_named_with_its_reason():
    tensor, pipeline = "tensor_model_parallel_size", "pipeline_model_parallel_size"
    odd = config_of(13, "--num-attention-heads 11 --hidden-size 704 ")
    space = SearchSpace(base=odd, nodes=NODES)
    assert "--num-attention-heads 11 cannot be split" in space.why_undivided(tensor)
    assert space.why_undivided(pipeline) is None
    assert replace(space, base=config_of(2)).why_undivided(tensor) is None
    assert "a rank would have no block" in replace(space, base=config_of(1)).why_undivided(pipeline)
    assert replace(space, nodes=Nodes.of(range(1), 1)).why_undivided(tensor) is None


CASES = (
    "--pp-partition-method type:transformer ",
    "--decoder-first-pipeline-num-layers 1 ",
    MOE + "--pp-partition-method type:transformer --moe-layer-freq [0,0,0,1,1,1,1] ",
)


@pytest.mark.parametrize("flags", CASES)
def test_memory_is_that_of_the_fullest_of_all_ranks(flags):
    config = config_of(7, PP4 + flags + "--micro-batch-size 2 ")
    forecast = RunForecast.of(config, VOCABULARY, NODES, is_cpu=False)
    by_place = []
    for run, count in forecast.places:
        by_place += count * [sum(len(each.layers) for each in run.stages)]
    assert by_place == list(map(len, config.parallel.stages(7)))
    ranks, model = forecast.first.ranks, forecast.first.model
    runs = (plan_run(model, ranks.at(place), is_cpu=False) for place in range(4))
    expected = max(sum(rank_memory(run)[0].values()) for run in runs)
    assert forecast.device_bytes == expected


def test_the_slowest_stage_counts():
    cluster = find_cluster(cluster="dgx-a100", num_nodes=1)
    times = []
    for first, last in ((2, 2), (1, 3), (3, 1)):
        flags = f"--decoder-first-pipeline-num-layers {first} "
        flags += f"--decoder-last-pipeline-num-layers {last} --pipeline-model-parallel-size 2 "
        flags += "--hidden-size 2048 --seq-length 2048 --micro-batch-size 1 "
        searched = Search(config_of(4, flags), VOCABULARY, cluster)
        times.append(searched.row(searched.space.given).seconds)
    assert min(times[1:]) > times[0] * (1 + TIE)
