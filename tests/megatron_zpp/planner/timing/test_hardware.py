"""The table of hardware is physical and has sources; what a user describes wrongly is explained."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_zpp.planner.timing.computing import Computing
from megatron_zpp.planner.timing.hardware import (
    GBIT,
    GIB,
    TYPICAL,
    find_cluster,
    hardware_table,
    parse_rate,
    table_gpu,
)
from tests.megatron_zpp.settings.command_lines import config_of
from zeropp.errors import InputError

TABLE = hardware_table()
FASTEST_NVLINK = 450e9  # bytes per second in each direction, of an H100


@pytest.mark.parametrize("name", TABLE["gpus"])
def test_constants_of_a_gpu_are_ordered_and_within_physical_limits(name):
    gpu = table_gpu(name)
    share = gpu.product_share
    assert 0 < share.slow <= share.typical <= share.fast < 1
    assert gpu.peak(torch.float16) > 1e14
    assert gpu.near_rate < FASTEST_NVLINK < gpu.memory_rate
    assert TABLE["gpus"][name]["sources"].strip()


@pytest.mark.parametrize("name", TABLE["clusters"])
def test_a_cluster_names_a_gpu_and_its_source(name):
    cluster = find_cluster(cluster=name, num_nodes=2)
    assert cluster.num_ranks == 2 * TABLE["clusters"][name]["gpus_per_node"]
    assert 0 < cluster.link_share.slow < cluster.link_share.fast <= 1
    assert TABLE["clusters"][name]["source"].strip()
    for level in ("slow", "typical", "fast"):
        assert cluster.at(level, torch.float16).far <= cluster.link_rate


def test_what_is_said_by_hand_replaces_the_table():
    preset = find_cluster(cluster="dgx-a100", num_nodes=4, link="25gbit")
    assert preset.link_rate == 25 * GBIT
    numbers = dict(gpu_tflops=165, gpu_bandwidth=1.0, gpu_memory=24, node_bandwidth=20)
    by_hand = find_cluster(num_nodes=2, gpus_per_node=2, link="10gbit", **numbers)
    assert by_hand.gpu.peak(torch.bfloat16) == 165e12
    assert by_hand.gpu.memory_rate == 1e12 and by_hand.gpu.near_rate == 20e9
    assert by_hand.usable_bytes < by_hand.gpu.memory_bytes == 24 * GIB


@pytest.mark.parametrize("text", ["0gbit", "-1gbit", "fast", "10", "10gb", ""])
def test_a_rate_that_is_none_is_refused(text):
    with pytest.raises(InputError, match="expected a rate above 0"):
        parse_rate(text, "--link")
    assert math.isclose(parse_rate("400 Mbit/s", "--link"), 5e7)


def test_a_gpu_without_a_format_says_what_to_do():
    with pytest.raises(InputError, match="plan with --fp16"):
        table_gpu("v100").peak(torch.bfloat16)


LLAMA = (
    "--hidden-size 1024 --num-attention-heads 8 --num-query-groups 2 --ffn-hidden-size 3072 "
    "--swiglu --position-embedding-type rope --rotary-percent 0.5 --seq-length 256 "
    "--micro-batch-size 2 --bf16"
)


def test_rotary_positions_and_gates_are_streamed_more_often_without_compile():
    config = config_of(LLAMA)
    compiled = replace(config, training=replace(config.training, compile=True))
    rates = find_cluster(cluster="dgx-h100").at(TYPICAL, torch.bfloat16)
    eager, fused = (
        Computing(config=each, itemsize=2, rates=rates).layer_passes(0, 0)
        for each in (config, compiled)
    )
    # 50 and 4 bytes of each turned channel of 10 heads of 128, 10 and 6 of each of the MLP
    num_bytes = 512 * ((50 - 4) * 10 * 64 + (10 - 6) * 3072)
    assert eager.forward - fused.forward == pytest.approx(num_bytes / rates.memory)
    assert eager.backward - fused.backward == pytest.approx(2 * num_bytes / rates.memory)
