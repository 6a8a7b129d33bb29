"""`copy.deepcopy` of an engine's module is the plain model with whole fp32 weights."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import config_of, engine_of, gathered_parameters, run
from tests.zeropp.lora_model import lora_model
from tests.zeropp.small_model import Block, loss_of, small_model, tokens_of
from zeropp import InputError

BF16 = {"bf16": {"enabled": True}}
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
HPZ = {"stage": 3, "zero_hpz_partition_size": 2}
MIXZ = {"stage": 3, "zero_quantized_nontrainable_weights": True}


class Wrapped(nn.Module):
    """The small model, its embedding under a second name, a 0-d parameter, buffers and hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_model()
        self.model.tied = nn.ParameterList([self.model.embedding.weight])
        self.model.scale = nn.Parameter(torch.tensor(1.0))
        self.model.blocks[0].norm.requires_grad_(False)
        self.model.register_buffer("calls", torch.zeros(()))
        self.model.register_buffer("unsaved", torch.ones(3), persistent=False)
        self.model.register_forward_hook(self.count)
        self.model.blocks[1].register_forward_pre_hook(lambda *_: None)

    def count(self, model: nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
        model.calls += 1
        return output * model.scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)

    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)


def attributes(module: nn.Module) -> Iterator[tuple[str, type, set[str], list[object]]]:
    """What tells a module from a sharded one, and the functions of its hooks."""
    for name, each in module.named_modules():
        held = [value for key, value in vars(each).items() if "_hooks" in key]
        hooks = [
            getattr(hook, "__func__", hook) for hooks in held if hooks for hook in hooks.values()
        ]
        yield name, type(each), set(vars(each)), [getattr(hook, "__name__", hook) for hook in hooks]


def check_plain(copied: nn.Module, original: nn.Module, fresh: nn.Module) -> None:
    """Compare with a model that was never sharded, and with the state of the sharded one."""
    assert [*attributes(copied)] == [*attributes(fresh)]
    state = original.state_dict()
    trained = {name: each.requires_grad for name, each in original.named_parameters()}
    assert {name: each.requires_grad for name, each in copied.named_parameters()} == trained
    for name, weight in copied.named_parameters(remove_duplicate=False):
        assert type(weight) is nn.Parameter and weight.is_leaf and weight.grad is None
        assert weight.dtype == state[name].dtype and torch.equal(weight, state[name])


@ranks(2)
def test_at_stage_0_one_rank_copies_alone():
    engine = engine_of(Wrapped(), stage=0, **BF16)
    run(engine, steps=1)
    masters = gathered_parameters(engine.module)
    with torch.no_grad():
        rounded = loss_of(engine, tokens_of(9))
    if dist.get_rank() == 0:
        copied = copy.deepcopy(engine.module)
        check_plain(copied, engine.module, Wrapped())
        model = copied.model
        assert model.tied[0] is model.embedding.weight
        assert model.calls == 2 and model.unsaved.tolist() == [1, 1, 1]
        loss = loss_of(copied, tokens_of(9))
        assert (model.calls, engine.module.model.calls) == (3, 2)  # the hook's module, too
        # Logits of 8 bits are products of 12 numbers of order one, which the engine's norms keep
        # in fp32; a loss changes by at most twice what they do.
        assert loss.item() == pytest.approx(rounded.item(), abs=4 * 12 * 2**-9)
        loss.backward()
        torch.optim.SGD(copied.parameters(), lr=1.0).step()
        block, blocks = (copy.deepcopy(each) for each in (engine.module.model.blocks[1],
                                                          engine.module.model.blocks))  # fmt: skip
        check_plain(block, engine.module.model.blocks[1], Wrapped().model.blocks[1])
        assert type(blocks) is nn.ModuleList and [type(each) for each in blocks] == 2 * [Block]
        assert torch.equal(blocks[1].up.weight, block.up.weight)
        with pytest.raises(InputError, match="weights beside its blocks: copy the model"):
            copy.deepcopy(engine.module.model)
    for name, weight in gathered_parameters(engine.module).items():
        assert torch.equal(weight, masters[name])
    with torch.no_grad():
        assert loss_of(engine, tokens_of(9)) == rounded
    other = engine_of(copy.deepcopy(engine.module), stage=3, **BF16)
    with torch.no_grad():
        assert loss_of(other, tokens_of(9)) == rounded
    run(other, steps=1)


@pytest.mark.parametrize(
    ("settings", "build"),
    [
        (dict(stage=1), Wrapped),
        (dict(zero_optimization=OFFLOADED), Wrapped),
        (dict(zero_optimization=HPZ), Wrapped),
        (dict(zero_optimization=MIXZ), lora_model),
    ],
    ids=["stage 1", "stage 2, offloaded", "stage 3, hpZ", "MixZ++"],
)
@ranks(4, ranks_per_node=2)
def test_sharded_weights_are_gathered_into_the_copy(settings, build):
    engine = engine_of(build(), **settings, **BF16)
    run(engine, steps=1)
    with torch.no_grad():
        loss_of(engine, tokens_of(0))  # leaves weights gathered, in bf16, or copies of them
    copied = copy.deepcopy(engine.module)
    check_plain(copied, engine.module, build())
    with torch.no_grad():
        if build is Wrapped:
            assert "generate" not in vars(copied) and "generate" in vars(engine.module)
            assert torch.equal(copied.generate(tokens_of(0)), copied(tokens_of(0)))
        loss = loss_of(copied, tokens_of(0))
        plain = build()
        plain.load_state_dict(engine.module.state_dict())
        for own, other in zip(plain.parameters(), copied.parameters(), strict=True):
            own.data = own.data.to(other.dtype)
        assert loss_of(plain, tokens_of(0)) == loss
    loss_of(copied, tokens_of(0)).backward()
    torch.optim.SGD(copied.parameters(), lr=0.1).step()
    copied.load_state_dict(copied.state_dict())
    blocks = next(each for each in engine.module.modules() if isinstance(each, nn.ModuleList))
    in_list = copy.deepcopy(blocks)
    assert type(in_list[1]) is Block
    in_list.load_state_dict(in_list.state_dict())
    run(engine, steps=1)


@ranks(2)
def test_other_modules_of_the_same_class_refuse_as_before():
    engine_of(stage=0)
    mesh = init_device_mesh("cpu", (2,))
    config = zeropp.ZeroConfig.from_json(config_of())
    sharded = zeropp.shard(small_model(), mesh, config).model
    for other in (fully_shard(Block(), mesh=mesh), sharded):
        with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
            copy.deepcopy(other)
