"""Passes of programs: `loss.backward()`, sums of several, penalties, `torch.func`; whole steps.

The reference of random penalties is one plain process that takes the micro-batches of all ranks. It
adds fp32 terms in another order: at most a hundred of them, each rounded to 2^-24 of values of
about 1, so 1e-5.
"""

import copy
import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import (
    SAMPLES,
    config_of,
    engine_of,
    gathered_parameters,
    logged,
    run,
)
from tests.zeropp.small_model import VOCAB_SIZE, SmallModel, loss_of, small_model, tokens_of
from zeropp import InputError


class WithLoss(SmallModel):
    """Returns its logits and, made from them, its loss, as models of transformers do."""

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = super().forward(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        return {"logits": logits, "loss": loss}


def micro_batches(step: int, count: int) -> Iterator[torch.Tensor]:
    yield from tokens_of(step, SAMPLES).chunk(dist.get_world_size())[dist.get_rank()].chunk(count)


def run_directly(engine: zeropp.Engine, steps: int = 4) -> list[float]:
    """As `run` does, without `engine(...)` and `engine.backward`."""
    count, losses = engine.gradient_accumulation_steps(), []
    for step in range(steps):
        total = torch.zeros(())
        for tokens in micro_batches(step, count):
            loss = loss_of(engine.module, tokens)
            loss.backward()
            engine.step()
            total += loss.detach() / count
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


@ranks(2)
def test_the_log_names_no_loss_that_it_does_not_know():
    engine = engine_of(steps_per_print=1)
    with logged() as lines:
        run_directly(engine, steps=1)
        run(engine, steps=1)
    lines = [line for line in lines if line.startswith("step ")]
    assert dist.get_rank() or lines[0].startswith("step 1, gradient norm ")
    assert dist.get_rank() or lines[1].startswith("step 2, loss ")


@pytest.mark.parametrize("stage", [0, 3])
@ranks(1)
def test_a_copy_of_the_module_has_nothing_to_do_with_the_engine(stage):
    engine = engine_of(stage=stage, micro_batches=2)
    expected = run(engine_of(stage=stage, micro_batches=2), steps=2)
    copied = copy.deepcopy(engine.module)
    assert run(engine, steps=1) == expected[:1]
    loss_of(copied, tokens_of(0)).backward()
    with pytest.raises(InputError, match=r"without engine.backward\(loss\)"):
        engine.step()
    assert run(engine, steps=1, first=1) == expected[1:]


class Recursive(nn.Module):
    """Calls itself: only what the outermost call returns goes to the caller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
        x = self.blocks[0](x)
        return self(x, again=False) if again else x


@ranks(1)
def test_a_module_that_calls_itself_is_one_pass():
    gradients = []
    for directly in (False, True):
        engine = engine_of(Recursive(), micro_batches=2, train_batch_size=2)
        loss = (engine.module if directly else engine)(torch.ones(1, 4)).square().mean()
        loss.backward() if directly else engine.backward(loss)
        gradients.append(engine.module.blocks[0].weight.grad.clone())
    assert torch.equal(*gradients)


@ranks(1)
def test_a_module_may_be_compiled():
    expected = run(engine_of(micro_batches=2), steps=2)
    engine = engine_of(micro_batches=2)
    engine.module.compile(backend="eager")
    assert run_directly(engine, steps=2) == pytest.approx(expected, rel=2**-23)


@ranks(2)
def test_whole_steps_by_train_batch():
    expected = run(engine_of(micro_batches=2), steps=3)
    torch.manual_seed(5)
    batches = (tokens for step in range(3) for tokens in micro_batches(step, 2))
    for wrap in (lambda each: {"tokens": each}, lambda each: (each,), lambda each: each):
        torch.manual_seed(5)
        engine = engine_of(WithLoss(), micro_batches=2)
        batches = [wrap(each) for step in range(3) for each in micro_batches(step, 2)]
        data = iter(batches)
        losses = [engine.train_batch(data).item() for _ in range(3)]
        assert losses == pytest.approx(expected, rel=2**-22) and engine.global_samples == 24
    engine = engine_of(micro_batches=2)
    with pytest.raises(InputError, match="a model that returns its loss, and it returned a Tensor"):
        engine.train_batch(iter([tokens_of(0)] * 2))
    with pytest.raises(InputError, match="needs data"):
        engine.train_batch()
    with pytest.raises(InputError, match="takes 2 micro-batches, and the data ended after 1"):
        engine.train_batch(iter(batches[:1]))
    with pytest.raises(StopIteration):
        engine.train_batch(iter([]))
    assert engine.micro_steps == 0


@ranks(2)
def test_train_batch_repeats_the_data_of_initialize():
    data = [torch.randint(0, VOCAB_SIZE, (6,)) for _ in range(8)]
    torch.manual_seed(5)
    engine, _, loader, _ = zeropp.initialize(
        model=WithLoss(), config=config_of(micro_batches=2), training_data=data
    )
    losses = [engine.train_batch().item() for _ in range(4)]  # each sees all of the data
    assert engine.training_dataloader is loader and len(loader) == 2
    assert losses == sorted(losses, reverse=True)


RTOL = 1e-5  # fp32 sums of other orders


def norm_of_plain(tokens: torch.Tensor) -> float:
    plain = small_model()
    loss_of(plain, tokens).backward()
    return torch.nn.utils.get_total_norm([each.grad for each in plain.parameters()]).item()


@pytest.mark.parametrize("stage", range(4))
@ranks(2)
def test_each_step_ends_an_accumulation_where_the_json_leaves_that_to_the_caller(stage):
    """Three passes, although the JSON names four; sums over the two ranks are twice the means."""
    engine = engine_of(
        stage=stage,
        micro_batches=4,
        managed_gradient_accumulation=False,
        gradient_allreduce_op="sum",
    )
    mine = tokens_of(0, 12).chunk(2)[dist.get_rank()].chunk(3)
    for tokens in mine:
        assert not engine.is_gradient_accumulation_boundary()
        engine.backward(loss_of(engine, tokens) / 3, scale_wrt_gas=False)
    engine.step()
    assert engine.was_step_applied() and engine.global_samples == 3 * 2  # of one sample and rank
    assert engine.get_global_grad_norm() == pytest.approx(
        2 * norm_of_plain(tokens_of(0, 12)), rel=RTOL
    )
    with pytest.raises(AssertionError, match="set_gradient_accumulation_boundary"):
        engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(InputError, match="coalesce_grad_reduction"):
        engine.coalesce_grad_reduction().__enter__()


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_the_gradients_of_several_passes_are_averaged_at_once(stage):
    engine = engine_of(stage=stage)
    mine = tokens_of(0, 12).chunk(2)[dist.get_rank()].chunk(3)
    for _ in range(2):
        with engine.coalesce_grad_reduction():
            engine.sharding.traffic.take()
            for tokens in mine:
                engine.backward(loss_of(engine, tokens) / 3)
            sent = engine.sharding.traffic.take()
            assert not any(size for (purpose, _), size in sent.items() if purpose == "gradients")
            with pytest.raises(AssertionError, match=r"step\(\) inside engine.no_sync"):
                engine.step()
            for nested in (engine.no_sync, engine.coalesce_grad_reduction):
                with pytest.raises(AssertionError):
                    nested().__enter__()
        engine.zero_grad() if engine.global_steps else engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(norm_of_plain(tokens_of(0, 12)), rel=RTOL)


@ranks(1)
def test_an_engine_without_shards_coalesces_nothing():
    with pytest.raises(NotImplementedError, match="stage 1, 2 or 3"):
        engine_of(stage=0).coalesce_grad_reduction().__enter__()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@ranks(1)
def test_forward_under_autocast(dtype):
    """The loss is that of `torch.autocast`; float16 has a loss scale, and weights stay in fp32."""
    autocast = {"enabled": True, "dtype": str(dtype), "lower_precision_safe_modules": ["x.Y"]}
    engine = engine_of(stage=2, torch_autocast=autocast)
    tokens, plain = tokens_of(0), small_model()
    with torch.autocast("cpu", dtype):
        expected = loss_of(plain, tokens)
    loss = loss_of(engine, tokens)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    engine.backward(loss)
    engine.step()
    assert engine.was_step_applied() and engine.dynamic_loss_scale() is (dtype == torch.float16)
    assert engine.optimizer.loss_scale == engine.optimizer.cur_scale == engine.loss_scale
    assert {each.dtype for each in engine.module.parameters()} == {torch.float32}


WIDTH, LR, NEAR = 6, 0.1, 1e-5
SGD = {"type": "SGD", "params": {"lr": LR}}


class Critic(nn.Module):
    """Returns scores (N,) and features (N, WIDTH) of `x` (N, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.1))
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.stem(x).tanh()
        for block in self.blocks:
            x = x + block(x)
        return self.gain * self.head(x).squeeze(-1), x


def critic() -> Critic:
    torch.manual_seed(3)
    return Critic()


def penalty_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def saliency_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x)[0].sum(), x)[0]


def func_grad_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda each: model(each)[0].sum())(x)


def hessian_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.hessian(lambda each: model(each)[0].sum())(x[:1])


def critic_loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    scores, features = model(x)
    return scores.square().mean() + features[:, 0].mean()


LOSSES = {
    "loss": lambda model, x: [critic_loss_of(model, x)],
    "penalty": lambda model, x: [penalty_of(model, x)],
    "both": lambda model, x: [critic_loss_of(model, x) + penalty_of(model, x)],
    "one after the other": lambda model, x: [critic_loss_of(model, x), penalty_of(model, x)],
    "penalty first": lambda model, x: [penalty_of(model, x), critic_loss_of(model, x)],
    "same graph": lambda model, x: [model(x)[0].square().mean(), model(x)[1].mean()],
}


@ranks(1)
def test_random_calls_on_one_rank():
    random_calls(stage=0)


@pytest.mark.parametrize("stage", range(4))
@ranks(2)
def test_random_calls_equal_one_plain_process(stage):
    random_calls(stage)


def random_calls(stage: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in range(3):
        draw = random.Random(10 * stage + seed)
        count = draw.randint(1, 3)
        plain = critic()
        engine = engine_of(
            critic(),
            stage=stage,
            optimizer=SGD,
            gradient_clipping=0.0,
            train_batch_size=2 * count * world,
            gradient_accumulation_steps=count,
        )
        for step in range(3):
            for number in range(count):
                kind, directly = draw.choice([*LOSSES]), draw.random() < 0.5
                where = f"{stage=}, seed {seed}, step {step}, {kind}, {directly=}"
                asks = draw.random() < 0.5
                generator = torch.Generator().manual_seed(100 * step + number)
                xs = torch.randn(world, 2, WIDTH, generator=generator)
                if asks:
                    for of in (saliency_of, func_grad_of, hessian_of):
                        near(of(engine, xs[rank]), of(plain, xs[rank]), f"{where}, {of.__name__}")
                losses = LOSSES[kind](engine, xs[rank])
                others = [loss for x in xs for loss in LOSSES[kind](plain, x)]
                names = draw.sample([name for name, _ in plain.named_parameters()], 2)
                trains = {name: draw.random() < 0.7 for name in names}
                is_late = draw.random() < 0.5  # or before the backward pass
                where += f", {trains}, {is_late=}"
                if not is_late:
                    freeze((engine.module, plain), trains)
                for loss in losses:
                    loss.backward() if directly else engine.backward(loss)
                for loss in others:
                    (loss / (count * world)).backward()
                freeze((engine.module, plain), trains)
                engine.step()
            with torch.no_grad():
                for parameter in plain.parameters():
                    if parameter.grad is not None:
                        parameter -= LR * parameter.grad
            plain.zero_grad()
            for name, weight in gathered_parameters(engine.module).items():
                near(weight, plain.get_parameter(name), f"{where}, {name}")


def freeze(models: tuple[nn.Module, ...], trains: dict[str, bool]) -> None:
    for model in models:
        for name, is_trained in trains.items():
            model.get_parameter(name).requires_grad_(is_trained)


def near(actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    difference = (actual - expected).abs().max().item()
    assert difference <= NEAR, f"{where}: {difference}"
