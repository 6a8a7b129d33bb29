"""What kernels stream that torch.compile would fuse."""

from dataclasses import replace

import pytest
import torch

from megatron_zpp.planner.timing.computing import layer_passes
from megatron_zpp.planner.timing.hardware import TYPICAL, Description, find_cluster
from tests.megatron_zpp.settings.command_lines import config_of

LLAMA = (
    "--hidden-size 1024 --num-attention-heads 8 --num-query-groups 2 --ffn-hidden-size 3072 "
    "--swiglu --position-embedding-type rope --rotary-percent 0.5 --seq-length 256 "
    "--micro-batch-size 2 --bf16"
)


def test_rotary_positions_and_gates_are_streamed_more_often_without_compile():
    config = config_of(LLAMA)
    compiled = replace(config, training=replace(config.training, compile=True))
    rates = find_cluster(Description(cluster="dgx-h100")).at(TYPICAL, torch.bfloat16)
    eager, fused = (layer_passes(each, 0, 0, 2, rates) for each in (config, compiled))
    # 50 and 4 bytes of each turned channel of 10 heads of 128, 10 and 6 of each of the MLP
    num_bytes = 512 * ((50 - 4) * 10 * 64 + (10 - 6) * 3072)
    assert eager.forward - fused.forward == pytest.approx(num_bytes / rates.memory)
    assert eager.backward - fused.backward == pytest.approx(2 * num_bytes / rates.memory)
