"""Checkpoints of the engine: in the middle of a step, and what a program saves with them."""

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import (
    SAMPLES,
    engine_of,
    gathered_parameters,
    logged,
    run,
)
from tests.zeropp.prescribed_gradients import ALL_THREE
from tests.zeropp.small_model import loss_of, tokens_of

OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
SETTINGS = {f"stage {stage}": dict(stage=stage) for stage in range(4)}
SETTINGS |= {
    "quantized": dict(zero_optimization=ALL_THREE, bf16={"enabled": True}),
    "offloaded": dict(zero_optimization=OFFLOADED),
    "offloaded at stage 1": dict(zero_optimization=OFFLOADED | {"stage": 1}),
    "delayed": dict(
        zero_optimization=OFFLOADED,
        zeropp={"delayed_param_update": True, "delayed_param_update_warmup": 0},
    ),
    "fp16": dict(fp16={"enabled": True, "initial_scale_power": 8}),
}


def half_a_step(engine: zeropp.Engine, step: int, half: int) -> float:
    """Take one of two micro-batches; return its loss."""
    mine = tokens_of(step, SAMPLES).chunk(dist.get_world_size())[dist.get_rank()]
    loss = loss_of(engine, mine.chunk(2)[half])
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.mark.parametrize("name", SETTINGS)
@ranks(2)
def test_saving_in_the_middle_of_a_step_saves_its_beginning_and_disturbs_nothing(name, tmp_path):
    undisturbed = engine_of(micro_batches=2, **SETTINGS[name])
    expected = run(undisturbed, steps=4)
    engine = engine_of(micro_batches=2, **SETTINGS[name])
    assert run(engine, steps=2) == expected[:2]
    losses = [half_a_step(engine, 2, 0)]
    with logged() as lines:
        path = engine.save_checkpoint(tmp_path, client_state={"micro_steps": engine.micro_steps})
        engine.save_16bit_model(tmp_path)
    assert path.name == "global_step2" and engine.micro_steps == 5
    assert dist.get_rank() or any("in the middle of a step" in line for line in lines)
    losses.append(half_a_step(engine, 2, 1))
    mean = torch.tensor(sum(losses) / 2, dtype=torch.float64)
    dist.all_reduce(mean)
    assert mean.item() / 2 == expected[2] and run(engine, 1, first=3) == expected[3:]
    again = engine_of(micro_batches=2, **SETTINGS[name])
    assert again.load_checkpoint(tmp_path)[1] == {"micro_steps": 5}
    assert (again.global_steps, again.micro_steps) == (2, 4)
    assert run(again, 2, first=2) == expected[2:]
    for name, weight in gathered_parameters(undisturbed.module).items():
        assert torch.equal(gathered_parameters(again.module)[name], weight)
