"""The engine trains as a plain PyTorch loop does, whatever the stage, the ranks and the optimizer.

Losses are compared over 4 AdamW steps: the ranks' sums are taken in another order, which changes
a gradient by at most 64 terms * 2^-24, and each step may add that again: 4 * 64 * 2^-24 = 1.5e-5
in the worst case; 1e-5 is the promise. What runs the same operations in the same order is equal.
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
    adamw,
    config_of,
    engine_of,
    gathered_parameters,
    logged,
    run,
    run_without_engine,
)
from tests.zeropp.small_model import SmallModel, loss_of, small_model, tokens_of
from zeropp import InputError

SAME = 1e-5


def check_like_plain_loop(stage: int, micro_batches: int) -> None:
    losses, norms, model = run_without_engine()
    engine = engine_of(stage=stage, micro_batches=micro_batches)
    assert engine.zero_optimization_stage() == stage
    assert run(engine) == pytest.approx(losses, rel=SAME)
    assert engine.get_global_grad_norm() == pytest.approx(norms[-1], rel=SAME)
    assert norms[-1] > 0.5  # so clipping was at work
    assert (engine.global_steps, engine.micro_steps) == (4, 4 * micro_batches)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(
            gathered_parameters(engine.module)[name], weight.detach(), rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(2)
def test_two_ranks_train_as_one_process(stage):
    check_like_plain_loop(stage, micro_batches=2)


@pytest.mark.parametrize("stage", [0, 3])
@ranks(1)
def test_one_rank_trains_as_one_process(stage):
    check_like_plain_loop(stage, micro_batches=2)


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


class AsAccelerate:
    """An engine as accelerate calls it: `step()` after the last micro-batch of a step only."""

    def __init__(self, engine: zeropp.Engine) -> None:
        self.engine, self.count = engine, 0

    def __call__(self, *arguments: object) -> torch.Tensor:
        return self.engine(*arguments)

    def gradient_accumulation_steps(self) -> int:
        return self.engine.gradient_accumulation_steps()

    def backward(self, loss: torch.Tensor) -> None:
        self.count += 1
        is_last = self.count % self.gradient_accumulation_steps() == 0
        self.engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        self.engine.backward(loss)
        if is_last:
            self.engine.step()

    def step(self) -> None:
        """Nothing: `backward` has done it."""


@pytest.mark.parametrize(("stage", "micro_batches"), [(1, 2), (2, 4), (3, 1), (3, 2)])
@ranks(2)
def test_who_says_where_a_step_ends_need_not_call_step_before_that(micro_batches, stage, tmp_path):
    expected = run(engine_of(stage=stage, micro_batches=micro_batches), steps=2)
    engine = engine_of(stage=stage, micro_batches=micro_batches)
    assert run(AsAccelerate(engine), steps=2) == expected
    assert (engine.global_steps, engine.micro_steps) == (2, 2 * micro_batches)
    engine.save_checkpoint(tmp_path)
    if micro_batches > 1:
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(loss_of(engine, tokens_of(9)))
        engine.save_checkpoint(tmp_path)  # what it has saved: a step that has begun is not in it
    engine.load_checkpoint(tmp_path)
    again = run(engine, steps=2)
    engine.load_checkpoint(tmp_path)
    assert run(AsAccelerate(engine), steps=2) == again


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
def test_frozen_parameters_stay_and_the_rest_trains_as_alone():
    def frozen() -> torch.nn.Module:
        model = small_model()
        model.embedding.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
        return model

    losses, _, plain = run_without_engine(model=frozen())
    engine = engine_of(frozen())
    assert run(engine) == pytest.approx(losses, rel=SAME)
    for name, weight in gathered_parameters(engine.module).items():
        if name.startswith(("embedding", "blocks.1")):
            assert torch.equal(weight, dict(plain.named_parameters())[name].detach())


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_evaluation_anywhere_sees_the_newest_weights_and_changes_nothing(stage):
    def evaluate() -> float:
        engine.eval()
        with torch.no_grad():
            value = loss_of(engine, tokens_of(9)).item()
        engine.train()
        return value

    expected = run(engine_of(stage=stage, micro_batches=2), steps=3)
    engine = engine_of(stage=stage, micro_batches=2)
    evaluations, losses = [evaluate()], []
    for step in range(3):
        mine = tokens_of(step).chunk(2)[dist.get_rank()]
        for tokens in mine.chunk(2):
            loss = loss_of(engine, tokens)
            assert evaluate() == evaluations[-1]
            engine.backward(loss)
            assert evaluate() == evaluations[-1]
            engine.step()
            losses.append(loss.item() / 2)
        evaluations.append(evaluate())
    assert len(set(evaluations)) == 4
    total = torch.tensor(losses).view(3, 2).sum(dim=1)
    dist.all_reduce(total)
    assert (total / 2).tolist() == pytest.approx(expected, rel=SAME)


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
def test_two_engines_in_one_process_do_not_disturb_each_other():
    expected = run(engine_of(), steps=3), run(engine_of(stage=1), steps=3)
    first, second = engine_of(), engine_of(stage=1)
    taken = [(run(first, 1, step)[0], run(second, 1, step)[0]) for step in range(3)]
    assert tuple(zip(*taken, strict=True)) == tuple(tuple(losses) for losses in expected)


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
