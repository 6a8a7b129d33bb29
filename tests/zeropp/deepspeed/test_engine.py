"""What an engine counts, answers, logs and saves, and how it skips; optimizers made before it.

What runs the same operations in the same order is equal. Sums over the ranks in another order
change a gradient by at most 64 terms * 2^-24, and each of 4 steps may add that again: 1e-5.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import (
    ADAMW,
    SAMPLES,
    adamw,
    config_of,
    engine_of,
    gathered_parameters,
    logged,
    run,
)
from tests.zeropp.prescribed_gradients import ALL_THREE
from tests.zeropp.small_model import SmallModel, loss_of, small_model, tokens_of
from zeropp import InputError

SAME = 1e-5


@ranks(2)
def test_batch_sizes_and_counters():
    engine, optimizer, loader, schedule = zeropp.initialize(
        SimpleNamespace(deepspeed_config=config_of(micro_batches=2)),
        small_model(),
        training_data=TensorDataset(torch.arange(11)),
    )
    assert engine.optimizer is optimizer and schedule is None
    assert engine.train_batch_size() == 8 and engine.gradient_accumulation_steps() == 2
    assert engine.train_micro_batch_size_per_gpu() == 2
    rank = dist.get_rank()
    assert (engine.global_rank, engine.local_rank, engine.world_size) == (rank, rank, 2)
    assert engine.device == torch.device("cpu") and engine.get_lr() == [ADAMW["params"]["lr"]]
    assert len(engine.blocks) == 2  # found in the model
    batches = [batch[0].tolist() for batch in loader]
    assert [len(batch) for batch in batches] == [2, 2]  # 11 samples: 5 per rank, full batches only
    everywhere = [None, None]
    dist.all_gather_object(everywhere, sum(batches, []))
    assert len(set(everywhere[0] + everywhere[1])) == 8
    boundaries = []
    for tokens in tokens_of(0, 2).chunk(2):
        engine.backward(loss_of(engine, tokens))
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.step()
    assert boundaries == [False, True] and (engine.micro_steps, engine.global_steps) == (2, 1)


@ranks(2)
def test_an_optimizer_made_before_sharding_trains_as_one_named_in_the_json():
    expected = run(engine_of(), steps=2)
    unnamed = config_of() | {"optimizer": {}}
    model = small_model()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    early = adamw(model.parameters())
    engine, returned, *_ = zeropp.initialize(model=model, optimizer=early, config=unnamed)
    assert returned is early
    assert run(engine, steps=2) == expected
    after = gathered_parameters(engine.module)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    engine, *_ = zeropp.initialize(model=small_model(), optimizer=adamw, config=unnamed)
    assert run(engine, steps=2) == expected
    model = small_model()
    chosen = [{"params": model.embedding.parameters()}, {"params": model.blocks.parameters()}]
    engine, *_ = zeropp.initialize(model=model, model_parameters=chosen, config=config_of())
    assert len(engine.optimizer.param_groups) == 2
    assert run(engine, steps=2) == pytest.approx(expected, rel=SAME)


@ranks(2)
def test_groups_keep_their_options_and_parameters_left_out_stay():
    def partly(model: torch.nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": [model.blocks[0].up.weight], "lr": 0.1},
            {"params": model.blocks[1].parameters(), "lr": 0.0},
        ]
        return torch.optim.SGD(groups, lr=1.0, momentum=0.5)

    model = small_model()
    unnamed = config_of() | {"optimizer": {}}
    engine, *_ = zeropp.initialize(model=model, optimizer=partly(model), config=unnamed)
    losses = run(engine)
    before = dict(small_model().named_parameters())
    after = gathered_parameters(engine.module)
    changed = {name for name in before if not torch.equal(before[name].detach(), after[name])}
    assert changed == {"blocks.0.up.weight"} and losses[0] != losses[1]


@ranks(2)
def test_fp16_overflow_skips_the_step_and_the_schedule():
    fp16 = {"enabled": True, "initial_scale_power": 19, "hysteresis": 1}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    engine = engine_of(fp16=fp16, scheduler=schedule, micro_batches=2)
    before = gathered_parameters(engine.module)
    run(engine, steps=1)
    assert engine.skipped_steps == 1 and engine.global_steps == 1
    assert engine.loss_scale == 2.0**18 and engine.lr_scheduler.last_epoch == 0
    assert all(
        torch.equal(before[name], now) for name, now in gathered_parameters(engine.module).items()
    )
    losses = run(engine, steps=11)
    assert 1 < engine.skipped_steps < 8 and losses[-1] < losses[0]
    assert engine.lr_scheduler.last_epoch == engine.global_steps - engine.skipped_steps
    assert engine.loss_scale == 2.0 ** (19 - engine.skipped_steps)


@ranks(2)
def test_gradients_that_are_not_numbers_end_with_an_error_and_no_update():
    engine = engine_of()
    before = gathered_parameters(engine.module)
    engine.backward(loss_of(engine, tokens_of(0)) * float("nan"))
    with pytest.raises(InputError, match="nan at step 1, and no update was made"):
        engine.step()
    assert all(
        torch.equal(before[name], now) for name, now in gathered_parameters(engine.module).items()
    )


@ranks(2)
def test_all_ranks_get_the_first_ranks_weights():
    torch.manual_seed(100 + dist.get_rank())
    engine = engine_of(SmallModel())
    torch.manual_seed(100)
    plain = SmallModel()
    for name, weight in plain.named_parameters():
        assert torch.equal(gathered_parameters(engine.module)[name], weight.detach())


@ranks(1)
def test_the_log_says_what_runs_and_every_nth_step():
    with logged() as lines:
        gather = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
        engine = engine_of(steps_per_print=2, zero_optimization=gather, tensorboard={})
        run(engine, steps=4)
    text = "\n".join(lines)
    assert "ZeRO stage 3, 1 ranks" in text and "tensorboard has no effect" in text
    assert "tensorboard has no effect here" in text and "--" not in text
    assert [line[:7] for line in lines if line.startswith("step ")] == ["step 2,", "step 4,"]


OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.02}}
SETTINGS = {
    "stage 2": dict(stage=2, scheduler=SCHEDULE),
    "stage 1, bf16": dict(stage=1, bf16={"enabled": True}),
    "quantized": dict(zero_optimization=ALL_THREE, bf16={"enabled": True}),
    "offloaded at stage 1": dict(zero_optimization=OFFLOADED | {"stage": 1}),
    "delayed in part": dict(
        zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.4}},
        bf16={"enabled": True},
        zeropp={"delayed_param_update": True, "delayed_param_update_warmup": 1},
    ),
    "delayed": dict(
        zero_optimization=OFFLOADED,
        zeropp={"delayed_param_update": True, "delayed_param_update_warmup": 0},
    ),
    "fp16": dict(fp16={"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2}),
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
        client = {"micro_steps": engine.micro_steps, "order": torch.arange(3)}
        path = engine.save_checkpoint(tmp_path, client_state=client)
        engine.save_16bit_model(tmp_path)
    assert path.name == "global_step2" == (tmp_path / "latest").read_text()
    assert engine.micro_steps == 5
    assert dist.get_rank() or any("in the middle of a step" in line for line in lines)
    losses.append(half_a_step(engine, 2, 1))
    mean = torch.tensor(sum(losses) / 2, dtype=torch.float64)
    dist.all_reduce(mean)
    assert mean.item() / 2 == expected[2] and run(engine, 1, first=3) == expected[3:]
    blank = small_model()
    for parameter in blank.parameters():
        parameter.data.fill_(0.25)
    again = engine_of(blank, micro_batches=2, **SETTINGS[name])
    loaded, client = again.load_checkpoint(tmp_path)
    assert loaded == path and client["micro_steps"] == 5 and client["order"].tolist() == [0, 1, 2]
    assert (again.global_steps, again.micro_steps) == (2, 4)
    assert run(again, 2, first=2) == expected[2:]
    for name, weight in gathered_parameters(undisturbed.module).items():
        assert torch.equal(gathered_parameters(again.module)[name], weight)


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
