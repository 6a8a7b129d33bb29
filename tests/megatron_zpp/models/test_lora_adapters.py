"""Adapters in files, and weights with changes merged into them."""

import pytest
import torch

from megatron_zpp.models.lora_adapters import Adapters, MergedWeights
from megatron_zpp.settings.config import LoraConfig
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


def test_changes_are_added_in_fp32_and_nothing_else_changes():
    merged = MergedWeights(
        InMemoryWeights(BASE), Adapters(InMemoryWeights(PAIR), LORA, "checkpoint")
    )
    facts = merged.facts()
    assert facts.keys() == BASE.keys() and all(one.is_meta for one in facts.values())
    weight = merged.read("blocks.0.mlp.input.weight")
    assert torch.equal(weight, torch.tensor([[2.5, 4.0, 5.5], [1.0, 7.0, 1.0]]))
    assert weight.dtype == facts["blocks.0.mlp.input.weight"].dtype == torch.float32
    assert torch.equal(merged.read("blocks.0.mlp.input.bias"), torch.ones(2))
    assert merged.read("norm.weight").dtype == torch.float64
    assert torch.equal(BASE["blocks.0.mlp.input.weight"], torch.ones(2, 3))


@pytest.mark.parametrize(
    ("base", "named"),
    [
        ({"blocks.0.mlp.input.weight": torch.ones(3, 3)},
         r"blocks\.0\.mlp\.input\.weight has shape \[3, 3\], expected \[2, 3\]"),
        ({}, r"checkpoint: its adapters are of another model:\n  missing: blocks\.0\.mlp\.input"),
    ],
)  # fmt: skip
def test_a_model_of_another_shape_is_named(base: dict, named: str):
    with pytest.raises(InputError, match=named):
        MergedWeights(InMemoryWeights(base), Adapters(InMemoryWeights(PAIR), LORA, "checkpoint"))


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({}, "checkpoint: no adapters"),
        ({name: one for name, one in PAIR.items() if "lora_A" in name},
         r"no lora_B for blocks\.0\.mlp\.input"),
    ],
)  # fmt: skip
def test_files_without_adapters_are_named(tensors: dict, named: str):
    with pytest.raises(InputError, match=named):
        Adapters(InMemoryWeights(tensors), LORA, "checkpoint")
