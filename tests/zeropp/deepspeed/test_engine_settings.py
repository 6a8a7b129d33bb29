"""What programs ask an engine, and what they change between steps."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of, gathered_parameters, logged, run
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError


@ranks(2)
def test_answers_and_counters(tmp_path):
    engine = engine_of(stage=2, micro_batches=2, bf16={"enabled": True}, steps_per_print=7)
    assert engine.get_batch_info() == (8, 2, 2)
    assert engine.gradient_clipping() == 0.5 and engine.steps_per_print() == 7
    assert engine.zero_optimization() and engine.zero_optimization_partition_gradients()
    assert not engine.zero_optimization_partition_weights() and not engine.dynamic_loss_scale()
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("adamw", None)
    assert engine.get_mom() == [(0.9, 0.999)] and not engine.was_step_applied()
    mine = tokens_of(0).chunk(2)[dist.get_rank()]
    applied, returned = [], []
    for tokens in mine.chunk(2):
        loss = loss_of(engine, tokens)
        returned.append(engine.backward(loss).item() / loss.item())
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [False, True] and returned == [0.5, 0.5]
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (1, 8, 2)
    engine.save_checkpoint(tmp_path)
    other = engine_of(stage=2, micro_batches=1, bf16={"enabled": True})
    other.load_checkpoint(tmp_path)
    assert other.global_samples == 8


@pytest.mark.parametrize("stage", range(4))
@ranks(2)
def test_a_step_may_get_more_or_fewer_micro_batches(stage):
    """Steps of 8, 4 and 16 samples; each as of an engine that never had another size."""
    engine = engine_of(stage=stage, train_batch_size=8, micro_batches=2)
    optimizers = []
    for samples, count in ((8, 2), (4, 1), (16, 4)):
        engine.set_train_batch_size(samples)
        assert engine.get_batch_info() == (samples, 2, count)
        mine = tokens_of(samples, samples).chunk(2)[dist.get_rank()]
        for number, tokens in enumerate(mine.chunk(count)):
            assert engine.is_gradient_accumulation_boundary() == (number == count - 1)
            engine.backward(loss_of(engine, tokens))
            if number == 0 and count > 1:
                engine.step()
                with pytest.raises(InputError, match="this step has begun"):
                    engine.set_train_batch_size(8)
            else:
                engine.step()
        optimizers.append(engine.get_global_grad_norm())
    plain = small_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01)
    for samples, norm in zip((8, 4, 16), optimizers, strict=True):
        loss_of(plain, tokens_of(samples, samples)).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()
        assert norm == pytest.approx(expected, rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(InputError, match=r"set_train_batch_size\(6\): expected a multiple of 4"):
        engine.set_train_batch_size(6)
    engine.set_train_micro_batch_size(1)
    assert engine.get_batch_info() == (8, 1, 4)


@pytest.mark.parametrize("stage", [0, 1])
@ranks(2)
def test_without_sync_gradients_wait_for_the_next_pass_outside(stage, tmp_path):
    """Two of three passes inside: their gradients add up to those of one pass over all."""
    engine = engine_of(stage=stage)
    mine = tokens_of(0, 12).chunk(2)[dist.get_rank()].chunk(3)
    with engine.no_sync():
        assert not engine.is_gradient_accumulation_boundary()
        for tokens in mine[:2]:
            engine.backward(loss_of(engine, tokens) / 3)
        with pytest.raises(InputError, match=r"step\(\) inside engine.no_sync"):
            engine.step()
        with pytest.raises(InputError, match="reentry is unsupported"), engine.no_sync():
            pass
    assert engine.micro_steps == 0
    engine.save_checkpoint(tmp_path)
    with pytest.raises(InputError, match="one outside engine.no_sync.. sends its gradients"):
        engine.step()
    engine.backward(loss_of(engine, mine[2]) / 3)
    engine.step()
    plain = small_model()
    loss_of(plain, tokens_of(0, 12)).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
    with engine.no_sync():
        engine.backward(loss_of(engine, mine[0]))
    engine.zero_grad()
    with logged() as lines:
        engine.save_checkpoint(tmp_path)
    assert not any("in the middle of a step" in line for line in lines)


@ranks(2)
def test_stages_that_average_after_each_pass_cannot_wait():
    for stage in (2, 3):
        with pytest.raises(InputError, match=f"no_sync .* ZeRO stage {stage}"):
            engine_of(stage=stage).no_sync().__enter__()


@ranks(2)
def test_whole_state_dicts_with_and_without_frozen_weights():
    model = small_model()
    model.blocks[1].requires_grad_(False)
    engine = engine_of(model)
    whole = engine.module_state_dict()
    trained = engine.module_state_dict(exclude_frozen_parameters=True)
    assert whole.keys() - trained.keys() == {k for k in whole if k.startswith("blocks.1.")}
    for name, weight in gathered_parameters(engine.module).items():
        assert torch.equal(whole[name], weight)


@ranks(2)
def test_steps_without_finite_gradients_are_skipped_if_the_json_says_so():
    bf16 = {"enabled": True, "check_grad_overflow": True}
    engine = engine_of(bf16=bf16, scheduler={"type": "WarmupLR"})
    before = gathered_parameters(engine.module)
    with logged() as lines:
        engine.backward(loss_of(engine, tokens_of(0)) * float("nan"))
        engine.step()
    assert not engine.was_step_applied() and engine.skipped_steps == engine.global_steps == 1
    assert engine.lr_scheduler.last_batch_iteration == -1
    assert dist.get_rank() or any("gradients are not finite" in line for line in lines)
    after = gathered_parameters(engine.module)
    assert all(torch.equal(before[name], after[name]) for name in before)
    run(engine, steps=2)
    assert engine.was_step_applied() and engine.skipped_steps == 1


@ranks(1)
def test_states_stay_on_the_device():
    engine = engine_of()
    for call in (engine.offload_states, engine.reload_states):
        with pytest.raises(InputError, match="offload_optimizer and offload_param in the JSON"):
            call(include=["optim_states"], device="cpu", non_blocking=True)


@ranks(1)
def test_the_scale_of_fp16_grows_by_deepspeeds_rule():
    engine = engine_of(fp16={"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2})
    scales = []
    for step in range(5):
        run(engine, steps=1, first=step)
        scales.append(engine.loss_scale)
    assert scales == [16, 16, 32, 32, 64]
