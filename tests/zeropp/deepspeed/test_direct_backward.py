"""Training through `engine.module(...)` and `loss.backward()`, as plain PyTorch programs do.

What runs the same operations in the same order is equal to the engine's own calls.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import SAMPLES, config_of, engine_of, logged, run
from tests.zeropp.prescribed_gradients import ALL_THREE
from tests.zeropp.small_model import VOCAB_SIZE, SmallModel, loss_of, tokens_of
from zeropp import InputError

QUANTIZED = dict(zero_optimization=ALL_THREE, bf16={"enabled": True})
SETTINGS = {f"stage {stage}": dict(stage=stage) for stage in range(4)}
SETTINGS |= {"bf16": dict(bf16={"enabled": True}), "quantized": QUANTIZED}
SETTINGS |= {
    "offloaded": dict(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})
}


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


@pytest.mark.parametrize("name", SETTINGS)
@ranks(2)
def test_it_trains_as_through_the_engine(name):
    for count in (1, 2):
        expected = run(engine_of(micro_batches=count, **SETTINGS[name]))
        engine = engine_of(micro_batches=count, **SETTINGS[name])
        # `run` adds up the losses in fp64.
        assert run_directly(engine) == pytest.approx(expected, rel=2**-23)
        assert engine.global_steps == 4 and engine.micro_steps == 4 * count
    assert run(engine, steps=1, first=4) == run(engine_of_run(name, count), steps=1, first=4)


def engine_of_run(name: str, count: int) -> zeropp.Engine:
    engine = engine_of(micro_batches=count, **SETTINGS[name])
    run(engine)
    return engine


@ranks(2)
def test_a_gradient_is_divided_once_by_the_number_of_micro_batches():
    """A loss that is made of another output, and a loss of two outputs."""

    def losses(of: str, *, directly: bool) -> list[float]:
        torch.manual_seed(5)
        engine = engine_of(WithLoss(), micro_batches=2)
        values = []
        for step in range(3):
            for tokens in micro_batches(step, 2):
                output = (engine.module if directly else engine)(tokens)
                loss = output["loss"]
                if of == "both":
                    loss = loss + 0.1 * output["logits"].square().mean()
                loss.backward() if directly else engine.backward(loss)
                engine.step()
                values.append(loss.item())
        return values

    for of in ("loss", "both"):
        assert losses(of, directly=True) == losses(of, directly=False)


@ranks(2)
def test_passes_of_both_kinds_may_follow_each_other():
    expected = run(engine_of(micro_batches=2), steps=2)
    engine = engine_of(micro_batches=2)
    losses = []
    for step in range(2):
        for number, tokens in enumerate(micro_batches(step, 2)):
            loss = loss_of(engine.module if number else engine, tokens)
            loss.backward() if number == step else engine.backward(loss)
            engine.step()
            losses.append(loss.item() / 2)
    totals = torch.tensor(losses, dtype=torch.float64).view(2, 2).sum(dim=1)
    dist.all_reduce(totals)
    assert (totals / 2).tolist() == expected


@pytest.mark.parametrize("stage", range(4))
@ranks(2)
def test_under_fp16_an_error_names_what_multiplies_by_the_scale(stage):
    fp16 = {"enabled": True, "initial_scale_power": 8}
    expected = run(engine_of(stage=stage, fp16=fp16, micro_batches=2), steps=3)
    engine = engine_of(stage=stage, fp16=fp16, micro_batches=2)
    with pytest.raises(InputError, match=r"call engine.backward\(loss\), or engine.scale"):
        loss_of(engine.module, tokens_of(0)).backward()
    engine.zero_grad()
    losses = []
    for step in range(3):
        for tokens in micro_batches(step, 2):
            loss = loss_of(engine.module, tokens)
            engine.scale(loss).backward()
            engine.step()
            losses.append(loss.item() / 2)
    totals = torch.tensor(losses, dtype=torch.float64).view(3, 2).sum(dim=1)
    dist.all_reduce(totals)
    assert (totals / 2).tolist() == expected


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
