"""State dicts of an engine's module: whole tensors, on one rank alone where it can be."""

import copy
import io
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of, gathered_parameters, run
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError
from zeropp.deepspeed import whole_state_dicts

BF16 = {"bf16": {"enabled": True}}
OFFLOADED = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
HPZ = {"stage": 3, "zero_hpz_partition_size": 2}


class TiedNames(nn.Module):
    """The small model whose embedding has a second name, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_model()
        self.head = nn.Module()
        self.head.weight = self.model.embedding.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)


def saved(state: dict) -> dict:
    """What another process reads of a state dict."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize("stage", [0, 1])
@ranks(2)
def test_below_stage_3_one_rank_saves_alone(stage):
    engine = engine_of(TiedNames(), stage=stage, **BF16)
    run(engine, steps=1)
    masters = gathered_parameters(engine.module)
    if dist.get_rank() == 0:
        state = engine.module.state_dict()
        assert state.keys() == TiedNames().state_dict().keys()
        assert all(type(value) is torch.Tensor for value in state.values())
        assert state["head.weight"].data_ptr() == state["model.embedding.weight"].data_ptr()
        assert state["head.weight"].float().numpy().shape == (37, 12)
        plain = TiedNames()
        plain.load_state_dict(saved(state))
        for name, weight in plain.named_parameters():
            assert state[name].dtype == torch.bfloat16 and torch.equal(weight, masters[name])
        blocks = engine.module.model.blocks
        assert torch.equal(blocks.state_dict()["1.up.bias"], masters["model.blocks.1.up.bias"])
    kept = engine.module.state_dict(keep_vars=True)
    assert all(kept[name] is each for name, each in engine.module.named_parameters())
    run(engine, steps=1)


@pytest.mark.parametrize(
    "settings",
    [dict(zero_optimization=OFFLOADED), dict(zero_optimization=HPZ)],
    ids=["offloaded", "hpZ"],
)
@ranks(4, ranks_per_node=2)
def test_sharded_weights_are_gathered_as_fp32_masters_and_load_again(settings):
    engine = engine_of(TiedNames(), **settings, **BF16)
    run(engine, steps=1)
    with torch.no_grad():
        loss = loss_of(engine, tokens_of(0))  # leaves weights gathered, in bf16, or copies of them
    state = engine.module.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    assert state["head.weight"] is state["model.embedding.weight"]
    masters = getattr(engine.optimizer, "masters", {})
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(state[name], masters.get(parameter, parameter).detach().full_tensor())
    assert any((value != value.bfloat16()).any() for value in state.values())
    part = engine.module.model.blocks[1].state_dict()
    assert torch.equal(part["up.weight"], state["model.blocks.1.up.weight"])
    expected = run(engine, steps=2)
    engine.module.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    with torch.no_grad():
        assert loss_of(engine, tokens_of(0)) != loss
    engine.module.load_state_dict(state)
    with torch.no_grad():
        assert loss_of(engine, tokens_of(0)) == loss
    again = engine.module.state_dict()
    assert all(torch.equal(again[name], value) for name, value in state.items())
    assert run(engine, steps=2) != expected  # with the moments of two more steps


@ranks(3)
def test_a_rank_that_gathers_alone_says_so_and_the_others_go_on():
    engine = engine_of(stage=3, train_batch_size=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_state_dicts, "LIMIT", timedelta(seconds=1))
        for _ in range(2):
            if dist.get_rank() == 0:
                start = time.monotonic()
                with pytest.raises(InputError, match=r"the ranks \[1, 2\] of 3 did not call it"):
                    torch.save(engine.module.state_dict(), io.BytesIO())
                assert 1 <= time.monotonic() - start < 10
        dist.barrier()
        if dist.get_rank() == 2:
            for call in (engine.state_dict, partial(copy.deepcopy, engine.module)):
                with pytest.raises(InputError, match=r"the ranks \[0, 1\] of 3"):
                    call()
        dist.barrier()
    assert whole_state_dicts.LIMIT < timedelta(seconds=30)
    if dist.get_rank() == 0:  # while the others are in GatheredParameters, below
        state = engine.module.state_dict()
        assert state.keys() == small_model().state_dict().keys()
        assert all(type(value) is torch.Tensor and not value.numel() for value in state.values())
        with pytest.raises(InputError, match="copy the model outside, on all ranks"):
            copy.deepcopy(engine.module)
    whole = gathered_parameters(engine.module)
    for name, value in engine.module.state_dict().items():  # of all ranks, however often each tried
        assert torch.equal(value, whole[name])
        assert torch.equal(value, dict(small_model().named_parameters())[name].detach())
