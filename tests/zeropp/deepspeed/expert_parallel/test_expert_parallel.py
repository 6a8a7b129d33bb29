"""Experts that ranks split by DeepSpeed's JSON, against one process in plain PyTorch.

Sums of fp32 in another order differ by 1e-7 or so of themselves; an Adam step is at most the
learning rate, 1e-2, times the relative error of its gradient.
"""

from datetime import timedelta
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.expert_parallel.mixtures import (
    DECAY,
    EPS,
    LR,
    STEPS,
    assert_close,
    config_of,
    engine_of,
    expected,
    mixture,
    run,
    run_alone,
)
from zeropp import InputError
from zeropp.deepspeed import whole_state_dicts
from zeropp.deepspeed.utils import safe_get_full_fp32_param
from zeropp.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
ALL_THREE = {**QUANTIZED, "zero_hpz_partition_size": 2}
BF16 = {"enabled": True}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


# With 2 experts, 2 ranks share one, whose second dim is cut.
@pytest.mark.parametrize(
    "family, stage, size, num_experts",
    [
        ("mixtral", 0, 4, 4), ("mixtral", 1, 2, 2), ("qwen3_moe", 2, 2, 4), ("qwen3_moe", 3, 4, 4),
        ("qwen3_moe", 3, 2, 2),
    ],
)  # fmt: skip
@ranks(4)
def test_it_equals_one_process(family: str, stage: int, size: int, num_experts: int) -> None:
    micro_batches = 1 + stage % 2
    engine = engine_of(mixture(family, num_experts), size, stage=stage, micro_batches=micro_batches)
    results, weights = expected(family, 4, micro_batches, num_experts)
    assert_close(run(engine), results)
    state = engine.module_state_dict()
    assert state.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(state[name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "size, settings",
    [
        (2, {"zero": ALL_THREE}),
        (4, {"zero": ALL_THREE, "bf16": BF16, "zeropp": {"weight_steps": True}}),
        (4, {"zero": QUANTIZED, "fp16": BF16}),
        (4, {"zero": QUANTIZED, "stage": 1}),
        (2, {"bf16": BF16, "stage": 0}),
        (2, {"zero": QUANTIZED | OFFLOADED, "optimizer": {"type": "AdamW", "params": {"lr": LR}}}),
    ],
)
@ranks(4)
def test_quantized_and_16_bit_losses_are_near(size: int, settings: dict) -> None:
    engine = engine_of(mixture("qwen3_moe"), size, micro_batches=2, **settings)
    losses = [loss for loss, _ in run(engine)]
    assert_close(losses, [loss for loss, _ in expected("qwen3_moe", 4, 2)[0]], 3e-3)


@ranks(4)
def test_unusual_engines_equal_one_process() -> None:
    results, _ = expected("mixtral", 4, 1)
    recomputing = mixture("mixtral")
    recomputing.config.use_cache = False
    recomputing.gradient_checkpointing_enable()
    assert_close(run(engine_of(recomputing, 2)), results)
    with zeropp.zero.Init():
        recorded = mixture("mixtral")
    assert_close(run(engine_of(recorded, 2)), results)
    model, json = mixture("mixtral"), config_of(4)
    del json["optimizer"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, foreach=True)
    engine = zeropp.initialize(model=model, optimizer=optimizer, config=json)[0]
    assert_close(run(engine), results)
    eager = mixture("mixtral")
    eager.set_experts_implementation("eager")
    assert_close(run(engine_of(eager, 2)), results)
    adamw = {"type": "AdamW", "params": {"lr": LR, "eps": EPS, "weight_decay": DECAY}}
    for size, zero in ((2, OFFLOADED), (4, OFFLOADED | {"offload_param": {"device": "cpu"}})):
        assert_close(run(engine_of(mixture("mixtral"), size, zero=zero, optimizer=adamw)), results)
    for size in (2, 4):
        once = {"micro_batches": 2, "zeropp": {"reduce_gradients_once": True}}
        engine = engine_of(mixture("mixtral"), size, **once)
        assert_close(run(engine), expected("mixtral", 4, 2)[0])
        once, sent = engine.sharding.expected_traffic(2), engine.sharding.traffic.take()
        assert sent == {key: STEPS * num_bytes for key, num_bytes in once.items()}


@pytest.mark.parametrize("zero", [{}, {**ALL_THREE, "zero_quantized_nontrainable_weights": True}])
@ranks(4)
def test_adapters_of_attention_beside_frozen_experts(zero: dict) -> None:
    def adapted() -> torch.nn.Module:
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
        torch.manual_seed(3)
        return peft.get_peft_model(mixture("qwen3_moe"), config)

    results = run(engine_of(adapted(), 2, zero=zero))
    assert_close(results[0][0], run_alone(adapted(), 4)[0][0], 3e-3)
    if not zero:
        assert_close(results, run_alone(adapted(), 4))


@ranks(4, timeout=180)
def test_a_run_stops_and_resumes_also_with_other_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "same"
    for settings in ({"zero": ALL_THREE, "bf16": {"enabled": True}}, {"stage": 1}):
        whole = engine_of(mixture("qwen3_moe"), 2, **settings)
        run(whole, 1)
        whole.save_checkpoint(folder, client_state={"step": 1})
        results = run(whole, 2, first=1)
        resumed = engine_of(mixture("qwen3_moe"), 2, **settings)
        assert resumed.load_checkpoint(folder)[1] == {"step": 1}
        assert run(resumed, 2, first=1) == results  # to the last digit
    other = engine_of(mixture("qwen3_moe"), 1, stage=2)  # no split experts
    other.load_checkpoint(folder, tag="global_step1")
    other.save_checkpoint(tmp_path / "whole")
    for size, stage in ((4, 3), (2, 0)):
        engine = engine_of(mixture("qwen3_moe"), size, stage=stage)
        engine.load_checkpoint(tmp_path / "whole")
        assert_close(run(engine, 2, first=1), results)


@ranks(4)
def test_tokens_stay_in_their_node_unless_more_ranks_split_experts() -> None:
    for size in (2, 4):
        engine = engine_of(mixture("qwen3_moe"), size)
        run(engine, 1)
        sent = engine.token_traffic.take()
        assert sent["expert", "in_node"] > 0
        assert (sent["expert", "across_nodes"] > 0) == (size == 4)


@pytest.mark.parametrize("size", [2, 4])
@ranks(4)
def test_weights_and_gradients_send_what_was_planned_and_coding_changes_no_bit(size: int) -> None:
    weights = []
    for coded in (False, True):
        zeropp = {"weight_steps": True, "code_messages": coded}
        engine = engine_of(mixture("qwen3_moe"), size, zero=ALL_THREE, bf16=BF16, zeropp=zeropp)
        run(engine, 1)
        engine.sharding.traffic.take()
        run(engine, 1, first=1)
        sent, plan = engine.sharding.traffic.take(), engine.sharding.plan
        assert coded or sent == engine.sharding.expected_traffic(1)
        weights.append([parameter.to_local() for parameter in engine.module.parameters()])
    assert all(map(torch.equal, *weights))
    experts = [unit.axis for unit in plan.units if unit.axis is not plan.axis]
    assert [(axis.num_losses, axis.nodes.num_ranks) for axis in experts] == [(4, 4 // size)] * 2


@ranks(2)
def test_a_rank_that_alone_asks_for_split_experts_gets_an_error() -> None:
    engine = engine_of(mixture("mixtral"), 2, stage=1)  # other weights are whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_state_dicts, "LIMIT", timedelta(seconds=1))
        if dist.get_rank() == 0:
            with pytest.raises(InputError, match=r"the ranks \[1\] of 2 did not call it"):
                engine.module.state_dict()
    dist.barrier()
    assert engine.module.state_dict().keys() == mixture("mixtral").state_dict().keys()


@ranks(4)
def test_ranks_and_settings_that_do_not_fit_are_refused() -> None:
    model = mixture("qwen3_moe")
    for size, text in ((3, "4 ranks: choose a number"), (8, "divides the ranks")):
        with pytest.raises(InputError, match=text):
            engine_of(model, size)
    with pytest.raises(InputError, match="has 6 experts"):
        engine_of(mixture("qwen3_moe", 6), 4)
    with pytest.raises(InputError, match="some experts would be split in a node"):
        engine_of(model, 2, zeropp={"ranks_per_node": 3})
    config = zeropp.ZeroConfig.from_json(config_of(2))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(InputError, match="give the model to zeropp.initialize"):
        zeropp.shard(model, mesh, config)


@ranks(2)
def test_files_and_values_have_whole_experts(tmp_path: Path) -> None:
    engine = engine_of(mixture("mixtral"), 2)
    run(engine, 1)
    state = engine.module_state_dict()
    engine.save_checkpoint(tmp_path)
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert weights.keys() == state.keys()
    assert all(torch.equal(weights[name], state[name]) for name in state)
    path = engine.save_16bit_model(tmp_path)
    if dist.get_rank() == 0:
        halves = torch.load(path)
        assert all(torch.equal(halves[name], state[name].bfloat16()) for name in state)
    experts = engine.module.model.layers[1].mlp.experts.down_proj
    values = torch.arange(experts.numel()).view(experts.shape) * 1e-4
    with zeropp.zero.GatheredParameters(experts, modifier_rank=1):
        assert experts.shape == (4, 32, 24)
        if dist.get_rank() == 1:
            experts.data.copy_(values)
    assert torch.equal(safe_get_full_fp32_param(experts), values)
    with pytest.raises(RuntimeError, match="by rank 1"):
        with zeropp.zero.GatheredParameters(experts, modifier_rank=1):
            if dist.get_rank() == 1:
                raise RuntimeError("by rank 1")
    assert torch.equal(safe_get_full_fp32_param(experts), values)
