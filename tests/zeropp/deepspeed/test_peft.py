"""Models of transformers, wrapped by PEFT, with their frozen weights stored quantized (MixZ++).

Losses of two fp32 runs whose sums are made in another order differ by 1e-6 or so of themselves.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

import zeropp
from megatron_zpp.capabilities.lora import adapters
from megatron_zpp.capabilities.lora.settings import LoraConfig
from megatron_zpp.interchange.families.table import FAMILIES
from megatron_zpp.interchange.open_model import open_model
from megatron_zpp.model.gpt import GPT
from megatron_zpp.settings.config import TokenizerConfig
from tests.megatron_zpp.interchange.foreign_models import gpt2, llama, saved
from tests.ranks import ranks
from tests.zeropp import lora_model
from tests.zeropp.lora_model import (
    add_adapters,
    engine_losses,
    local_tensor,
    with_quantized_weights,
)
from tests.zeropp.lora_model import lora_model as small_lora_model
from tests.zeropp.small_model import loss_of as small_loss_of
from tests.zeropp.small_model import small_model
from tests.zeropp.small_model import tokens_of as small_tokens_of
from zeropp import InputError
from zeropp.wire.quantized_shard import is_quantized

RANK, ALPHA, STEPS = 4, 8, 4
LLAMA_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MIXZ = {"stage": 3, "zero_quantized_nontrainable_weights": True}
CLOSE = 1e-5


def converted(model: nn.Module, layers: tuple[str, ...] = LLAMA_LAYERS) -> peft.PeftModel:
    """The model with PEFT's LoRA in it, A and B seeded."""
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(layers))
    torch.manual_seed(3)
    return peft.get_peft_model(model, config)


def tokens_of(step: int) -> Tensor:
    return torch.randint(97, (8, 12), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def own_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def plain_losses(model: nn.Module) -> list[float]:
    """Of one process with PyTorch's AdamW."""
    return lora_model.expected_losses(model, STEPS, 2, 2, loss_of, tokens_of)


@functools.cache
def plain_lora_losses() -> list[float]:
    return plain_losses(with_quantized_weights(converted(llama()), 2))


def config_of(zero: dict) -> dict:
    optimizer = {"type": "AdamW", "params": {"lr": lora_model.LR, "weight_decay": 0.01}}
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    return batch | {"zero_optimization": zero, "optimizer": optimizer}


def losses_of(engine: zeropp.Engine, loss_of: Callable = loss_of) -> list[float]:
    engine.train()
    return lora_model.engine_losses(engine, STEPS, loss_of, tokens_of)


@pytest.mark.parametrize("when", ["before", "after"])
@ranks(2)
def test_frozen_before_and_after(when: str) -> None:
    expected = plain_lora_losses()
    if when == "before":
        engine, *_ = zeropp.initialize(model=converted(llama()), config=config_of(MIXZ))
    else:
        engine, *_ = zeropp.initialize(model=llama(), config=config_of(MIXZ))
        converted(engine.module)
        engine.optimizer.quantize_nontrainable_params()
    parameters = dict(engine.module.named_parameters())
    frozen = {name: parameter for name, parameter in parameters.items() if ".lora_" not in name}
    assert all(is_quantized(parameter) == (parameter.ndim > 1) for parameter in frozen.values())
    wide = parameters[next(name for name in parameters if "gate_proj.lora_B" in name)]
    assert wide.shape == (40, RANK) and len(local_tensor(wide)) == 20
    assert losses_of(engine) == pytest.approx(expected, rel=CLOSE)
    assert expected[-1] < expected[0] - 0.05


# Layers that are one in our model and in theirs: of a Llama's queries, keys and values each has an
# A of its own in PEFT, and ours have one together.
ALIKE = {
    "llama": (llama, ("o_proj", "gate_proj", "up_proj", "down_proj"),
              ("attention.output", "mlp.gate", "mlp.input", "mlp.output")),
    "gpt2": (lambda: gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
             ("c_attn", "c_proj", "c_fc"), None),
}  # fmt: skip


def peft_converter(
    kind: type[peft.PeftConfig], **settings: object
) -> Callable[[nn.Module], peft.PeftModel]:
    """A function that converts a model as PEFT's `kind` of configuration says, seeded."""

    def convert(model: nn.Module) -> peft.PeftModel:
        torch.manual_seed(3)
        return peft.get_peft_model(model, kind(**settings))

    return convert


# PEFT keeps parameters in dicts of a layer, or copies whole layers.
LORA, GPT2 = peft.LoraConfig, ALIKE["gpt2"][0]
CONVERSIONS = {
    "embedding": (GPT2, peft_converter(LORA, r=RANK, target_modules=["c_attn", "wte"])),
    "copy of a norm": (
        GPT2,
        peft_converter(LORA, r=RANK, target_modules=["c_fc"], modules_to_save=["ln_1"]),
    ),
    "head": (
        llama,
        peft_converter(LORA, r=RANK, target_modules=["embed_tokens", "q_proj", "lm_head"]),
    ),
    "copy of the head": (
        llama,
        peft_converter(LORA, r=RANK, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    ),
    "IA3": (
        llama,
        peft_converter(
            peft.IA3Config,
            target_modules=["k_proj", "v_proj", "down_proj"],
            feedforward_modules=["down_proj"],
        ),
    ),
}


@pytest.mark.parametrize(
    ("kind", "when"), [*((kind, "after") for kind in CONVERSIONS), ("head", "before")]
)
@ranks(2)
def test_everything_that_peft_adds_is_gathered(kind: str, when: str) -> None:
    make, convert = CONVERSIONS[kind]
    engine, *_ = zeropp.initialize(
        model=convert(make()) if when == "before" else make(), config=config_of(MIXZ)
    )
    if when == "after":
        convert(engine.module)
        engine.optimizer.quantize_nontrainable_params()
    expected = plain_losses(with_quantized_weights(convert(make()), 2))
    assert losses_of(engine) == pytest.approx(expected, rel=CLOSE)
    for parameter in engine.module.parameters():
        assert is_quantized(parameter) == (parameter.ndim > 1 and not parameter.requires_grad)


@pytest.mark.parametrize("when", ["before", "after"])
@ranks(4, ranks_per_node=2)
def test_transformers_generate(when: str) -> None:
    """PEFT's asks the model inside it, whose embeddings are the whole's; once they cross nodes."""
    config = config_of(MIXZ | {"zero_hpz_partition_size": 2})
    config["train_micro_batch_size_per_gpu"] = 1
    arguments = {"input_ids": tokens_of(0)[:2, :6], "max_new_tokens": 6, "do_sample": False}
    expected = with_quantized_weights(converted(llama()), 4).generate(**arguments)
    if when == "before":
        engine, *_ = zeropp.initialize(model=converted(llama()), config=config)
    else:
        engine, *_ = zeropp.initialize(model=llama(), config=config)
        converted(engine.module)
        engine.optimizer.quantize_nontrainable_params()
    assert torch.equal(engine.eval().generate(**arguments), expected)
    engine.sharding.traffic.take()
    assert torch.equal(engine.generate(**arguments), expected)
    sent = engine.sharding.traffic.take()
    assert sent["weights_forward", "across_nodes"] == 0 < sent["weights_forward", "in_node"]


@ranks(2)
def test_adapters_are_saved_as_peft_saves_them(tmp_path: object) -> None:
    engine, *_ = zeropp.initialize(model=llama(), config=config_of(MIXZ))
    model = converted(engine.module)
    engine.optimizer.quantize_nontrainable_params()
    losses_of(engine)
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    with zeropp.zero.GatheredParameters(trained):
        if dist.get_rank() == 0:
            model.save_pretrained(tmp_path / "adapters")
    dist.barrier()
    base = with_quantized_weights(llama().requires_grad_(False), 2)
    plain = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    with torch.no_grad():
        logits, expected = (
            model(input_ids=tokens_of(9)).logits for model in (engine.eval(), plain)
        )
    assert torch.allclose(logits, expected, atol=1e-5)


@ranks(2)
def test_the_snippet_of_the_tutorial() -> None:
    """MixZ++'s tutorial: a base model is initialized, converted to LoRA, and one call follows."""
    expected = plain_lora_losses()
    model, args = llama(), SimpleNamespace(local_rank=0, deepspeed_config=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lora_model.LR, weight_decay=0.01)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    ds_config = {name: value for name, value in config_of(MIXZ).items() if name != "optimizer"}

    model, optimizer, _, lr_scheduler = zeropp.initialize(
        model=model,
        optimizer=optimizer,
        args=args,
        config=ds_config,
        lr_scheduler=lr_scheduler,
        dist_init_required=True,
    )
    converted(model.module)
    model.optimizer.quantize_nontrainable_params()

    assert losses_of(model) == pytest.approx(expected, rel=CLOSE)
    assert {parameter for group in optimizer.param_groups for parameter in group["params"]} == {
        adapter for name, adapter in model.module.named_parameters() if ".lora_" in name
    }


def own_copy(theirs: nn.Module, folder: object, targets: tuple[str, ...] | None) -> GPT:
    """Our GPT with the weights of one of theirs and LoRA, without adapters' values."""
    numbers = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=theirs.config.vocab_size)
    saved(theirs, folder)  # by the first rank
    dist.barrier()
    opened = open_model(folder, numbers)
    lora = LoraConfig(
        pretrained_checkpoint="theirs", lora_rank=RANK, lora_alpha=ALPHA,
        lora_target_modules=targets,
    )  # fmt: skip
    model = adapters.add_adapters(GPT(opened.config, opened.tokenizer.vocab_size), lora)
    opened.fill(model)
    return model


@torch.no_grad()
def copy_adapters(theirs: peft.PeftModel, ours: GPT) -> None:
    """Let our A be theirs; every B is zero to begin with."""
    there = dict(theirs.base_model.model.named_parameters())
    (table,) = (each.names for each in FAMILIES if each.name == theirs.config.model_type)
    for name, parameter in ours.named_parameters():
        layer = name.split(".lora_")[0]
        if ".lora_A." in name:
            (weight,) = table.row(f"{layer}.weight").hf_names
            parameter.copy_(there[weight.removesuffix("weight") + "lora_A.default.weight"])
        elif ".lora_B." in name:
            parameter.zero_()


@pytest.mark.parametrize("kind", ALIKE)
@ranks(2)
def test_our_lora_trains_like_pefts(kind: str, tmp_path: object) -> None:
    make, layers, targets = ALIKE[kind]
    theirs = converted(make(), layers)
    ours = own_copy(make(), tmp_path, targets)
    copy_adapters(theirs, ours)
    zero = config_of({"stage": 3})
    expected = losses_of(zeropp.initialize(model=theirs, config=zero)[0])
    own_losses = losses_of(zeropp.initialize(model=ours, config=zero)[0], own_loss)
    assert own_losses == pytest.approx(expected, rel=CLOSE)
    assert expected[-1] < expected[0] - 0.05


CONFIG = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "zero_optimization": MIXZ}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


@ranks(2)
def test_a_model_without_an_optimizer_is_quantized_too():
    engine, *_ = zeropp.initialize(model=small_model(), config=CONFIG)
    engine.module.requires_grad_(False)
    engine.quantize_nontrainable_params()
    assert is_quantized(engine.module.blocks[0].up.weight)
    with torch.no_grad():
        loss = small_loss_of(engine, small_tokens_of(0)).item()
        expected = small_loss_of(
            with_quantized_weights(small_model().requires_grad_(False), 2), small_tokens_of(0)
        ).item()
    assert loss == pytest.approx(expected, rel=1e-5)


@ranks(1)
def test_an_optimizer_of_nothing_is_an_error():
    frozen = small_model().requires_grad_(False)
    with pytest.raises(InputError, match="all parameters are frozen"):
        zeropp.initialize(model=frozen, config=CONFIG | {"optimizer": ADAMW})


@ranks(2)
def test_names_in_an_optimizer_stay_those_of_its_parameters():
    model = small_model()
    optimizer = torch.optim.SGD(
        [
            {"params": list(model.blocks.named_parameters(prefix="blocks"))},
            {"params": [("embedding.weight", model.embedding.weight)], "lr": 0.0},
        ],
        lr=0.1,
    )
    engine, *_ = zeropp.initialize(model=model, optimizer=optimizer, config=CONFIG)
    add_adapters(engine.module)
    engine.optimizer.quantize_nontrainable_params()
    first, second = optimizer.param_groups
    named = dict(engine.module.named_parameters())
    assert [named[name] for name in first["param_names"]] == first["params"]
    assert len(first["params"]) == 8 and second["params"] == second["param_names"] == []


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_adapters_that_are_added_later_need_no_process_groups_of_their_own(stage):
    zero = {"zero_optimization": MIXZ | {"stage": stage}}
    engine, *_ = zeropp.initialize(model=small_model(), config=CONFIG | zero)
    before = dict(c10d._world.pg_names)
    add_adapters(engine.module)
    engine.quantize_nontrainable_params()
    assert engine.sharding.units[1] is not engine.module.blocks[1]  # a unit of adapters
    assert dict(c10d._world.pg_names) == before


@ranks(2)
def test_parameters_may_be_frozen_and_unfrozen_later():
    engine, *_ = zeropp.initialize(model=small_lora_model(), config=CONFIG | {"optimizer": ADAMW})
    engine_losses(engine, 1)
    gain, thin = engine.module.blocks[0].norm.weight, engine.module.blocks[1].up.down.weight
    gain.requires_grad_(True)
    thin.requires_grad_(False)
    engine.quantize_nontrainable_params()
    before = gain.full_tensor().clone(), thin.full_tensor().clone()
    engine_losses(engine, 2)
    assert is_quantized(thin) and torch.equal(thin.full_tensor(), before[1])
    assert not torch.equal(gain.full_tensor(), before[0])
    everywhere = [torch.empty_like(before[0]) for _ in range(2)]
    dist.all_gather(everywhere, gain.full_tensor())
    assert torch.equal(*everywhere)
