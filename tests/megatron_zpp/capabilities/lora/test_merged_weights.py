"""The adapters of a checkpoint, and weights with adapters merged."""

import pytest
import torch

from megatron_zpp.capabilities.lora.merged_weights import CheckpointAdapters, MergedWeights
from megatron_zpp.capabilities.lora.settings import LoraConfig
from tests.megatron_zpp.train.lora_checkpoint import InMemoryWeights
from zeropp import InputError

LORA = LoraConfig(pretrained_checkpoint="base", lora_rank=2, lora_alpha=3.0)
PAIR = {
    "blocks.0.mlp.input.lora_A.weight": torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]),
    "blocks.0.mlp.input.lora_B.weight": torch.tensor([[1.0, 0.0], [0.0, 4.0]]).bfloat16(),
}
BASE = {
    "blocks.0.mlp.input.weight": torch.ones(2, 3).bfloat16(),
    "blocks.0.mlp.input.bias": torch.ones(2),
    "norm.weight": torch.ones(3).double(),
}


def adapters(tensors: dict[str, torch.Tensor] = PAIR) -> CheckpointAdapters:
    expected = {name: tensor.to("meta") for name, tensor in PAIR.items()}
    return CheckpointAdapters(InMemoryWeights(tensors), LORA, "checkpoint", expected)


def test_adapters_are_merged_in_fp32_and_other_weights_stay():
    merged = MergedWeights(InMemoryWeights(BASE), adapters())
    facts = merged.facts()
    assert facts.keys() == BASE.keys() and all(tensor.is_meta for tensor in facts.values())
    weight = merged.read("blocks.0.mlp.input.weight")
    assert torch.equal(weight, torch.tensor([[2.5, 4.0, 5.5], [1.0, 7.0, 1.0]]))
    assert weight.dtype == facts["blocks.0.mlp.input.weight"].dtype == torch.float32
    assert torch.equal(merged.read("blocks.0.mlp.input.bias"), torch.ones(2))
    assert merged.read("norm.weight").dtype == torch.float64
    assert torch.equal(BASE["blocks.0.mlp.input.weight"], torch.ones(2, 3))


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ({"blocks.0.mlp.input.weight": torch.ones(3, 3)},
         r"blocks\.0\.mlp\.input\.weight has shape \[3, 3\], expected \[2, 3\]"),
        ({}, r"checkpoint: its adapters are of another model:\n  missing: blocks\.0\.mlp\.input"),
    ],
)  # fmt: skip
def test_layers_of_another_shape_are_named(base: dict, message: str):
    with pytest.raises(InputError, match=message):
        MergedWeights(InMemoryWeights(base), adapters())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "checkpoint: no adapters"),
        ({name: tensor for name, tensor in PAIR.items() if "lora_A" in name},
         r"only in the model: blocks\.0\.mlp\.input\.lora_B\.weight"),
        (PAIR | {"blocks.0.mlp.gate.lora_B.weight": torch.ones(2, 2)},
         r"only in the checkpoint: blocks\.0\.mlp\.gate\.lora_B\.weight"),
        ({name: tensor.repeat(2, 1) for name, tensor in PAIR.items()},
         r"lora_A\.weight has shape \[4, 3\] in the checkpoint, \[2, 3\] in the model"),
    ],
)  # fmt: skip
def test_checkpoints_with_other_adapters_raise(tensors: dict, message: str):
    with pytest.raises(InputError, match=message):
        adapters(tensors)
