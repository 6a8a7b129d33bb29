"""Models of every kind, as `build_model` builds them for ranks."""

from collections.abc import Iterator

import pytest
from torch import nn

from megatron_zpp.capabilities.lora.adapters import add_adapters
from megatron_zpp.capabilities.lora.settings import LoraConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.recipe import model as recipe
from tests.megatron_zpp.interchange.family_flags import FLAGS
from tests.megatron_zpp.model.small import GPT2, LLAMA, VOCABULARY
from tests.megatron_zpp.parallel.flags import CP2, GATHERED, PP2, SP, TP2, TWO_STAGES
from tests.megatron_zpp.train.training_runs import built_run
from tests.ranks import ranks

KINDS = (
    "",
    "--zero-stage 3 --recompute-granularity full --recompute-num-layers 2",
    FLAGS["gemma3"] + TP2 + "--recompute-granularity selective",
    FLAGS["olmo2"] + TP2 + SP + "--compile",
    FLAGS["qwen2"] + CP2,
    CP2 + GATHERED + TP2 + SP + "--recompute-granularity full",
    f"--num-layers 4 --micro-batch-size 1 --global-batch-size 4 {PP2}{TWO_STAGES}",
    f"{PP2}{TP2}{SP}--cpu-optimizer --zero-stage 1",
)


def functions_held(model: nn.Module) -> Iterator[str]:
    """Yield what a module of the model holds that somebody could call, or put another in place."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if callable(value) and not isinstance(value, nn.Module):
                yield f"{name}.{attribute}"


@pytest.mark.parametrize("flags", KINDS)
@ranks(4)
def test_a_model_holds_no_function(flags):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "COMPILER", "eager")
        with built_run(flags) as run:
            model = run.trainer.sharding.model
            for root in (model, *getattr(model, "roots", ())):
                assert list(functions_held(root)) == []


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_adapters_hold_no_function(config):
    lora = LoraConfig(pretrained_checkpoint="m", lora_rank=2)
    model = add_adapters(GPT(config, VOCABULARY), lora)
    assert list(functions_held(model)) == []
    model.norm.forward = model.norm.forward
    assert list(functions_held(model)) == ["norm.forward"]
