"""Models that use a block without calling it: holders, methods, weights; they train as one process.

The plain reference adds fp32 terms in another order: at most a hundred of them, each rounded to
2^-24 of values of about 1, so 1e-5.
"""

import copy
import io
import itertools
import pickle
import re
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of, gathered_parameters, logged
from tests.zeropp.prescribed_gradients import ALL_THREE

WIDTH, LR, NEAR = 8, 0.1, 1e-5
SGD = {"type": "SGD", "params": {"lr": LR}}


class Block(nn.Module):
    """Has a second method beside `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x)).tanh()

    half = forward


class Linear(torch.autograd.Function):
    """As fused kernels take weights."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


def holder() -> nn.Module:
    each = nn.Module()
    each.norm, each.linear = nn.LayerNorm(WIDTH), nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
    each.scale = nn.Parameter(torch.ones(WIDTH))
    each.scales = nn.ParameterList([torch.ones(WIDTH)])
    return each


def in_dict() -> nn.Module:
    return nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "linear": nn.Linear(WIDTH, WIDTH)})


def attended(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer.forward(x, x, x, need_weights=False)[0]


def clamped(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    layer.linear.weight.data.clamp_(-0.2, 0.2)
    return layer(x)


def written(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Write what was computed from weights that were gathered for it."""
    weight, scale = layer.linear.weight.data, layer.norm.weight.data
    weight.copy_(weight / weight.abs().max())
    scale /= scale.max()
    return layer.half(x)


def averaged(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mean = torch.zeros(WIDTH, WIDTH)
    with torch.no_grad():
        mean.lerp_(layer.linear.weight, 0.5).add_(layer.linear.weight.data)
    return F.linear(x, mean)


def doubled(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return functional_call(layer, {name: 2 * each for name, each in layer.named_parameters()}, x)


def with_detached(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return functional_call(layer, {n: each.detach() for n, each in layer.named_parameters()}, x)


# What makes a block, and how the model uses it.
USES = {
    "holder": (
        holder,
        lambda layer, x: layer.linear[0](layer.norm(x)) * layer.scale * layer.scales[0],
    ),
    "dict": (in_dict, lambda layer, x: layer["linear"](layer["norm"](x))),
    "forward": (Block, lambda layer, x: layer.forward(x)),
    "method": (Block, lambda layer, x: layer.half(x)),
    "inner": (Block, lambda layer, x: layer.linear(x)),
    "weights": (
        Block,
        lambda layer, x: F.linear(x, layer.linear.weight) + x @ layer.linear.weight.T,
    ),
    "detached": (Block, lambda layer, x: F.linear(x, layer.linear.weight.detach())),
    "data": (Block, lambda layer, x: x * layer.norm.weight.data + layer.linear(x)),
    "clamped": (Block, clamped),
    "called, and not": (Block, lambda layer, x: layer(x) + layer.forward(x)),
    "not, and called": (Block, lambda layer, x: layer.half(x) + layer(x) + layer(2 * x)),
    "twice": (Block, lambda layer, x: layer.forward(layer.forward(x))),
    "recomputed": (
        Block,
        lambda layer, x: checkpoint(layer.forward, x, use_reentrant=False),
    ),
    "reentrant": (Block, lambda layer, x: checkpoint(layer.half, x, use_reentrant=True)),
    "functional": (
        Block,
        lambda layer, x: functional_call(
            layer.linear, {name: 2 * each for name, each in layer.linear.named_parameters()}, x
        ),
    ),
    "called functionally": (Block, doubled),
    "called with detached": (Block, with_detached),
    "written": (Block, written),
    "averaged": (Block, averaged),
    "copied": (Block, lambda layer, x: copy.deepcopy(layer.linear)(x).detach() + layer(x)),
    "reentrant weight": (
        Block,
        lambda layer, x: checkpoint(F.linear, x, layer.linear.weight, use_reentrant=True),
    ),
    "Function": (Block, lambda layer, x: Linear.apply(x, layer.linear.weight)),
    "slice": (
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        lambda layer, x: layer[1:](layer[0](x)),
    ),
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 2), attended),
    "LSTM": (lambda: nn.LSTM(WIDTH, WIDTH), lambda layer, x: layer.forward(x)[0]),
    "evaluated by call": (
        Block,
        lambda layer, x: layer.forward(x) if torch.is_grad_enabled() else layer(x),
    ),
    "only metadata": (
        Block,
        lambda layer, x: x if layer.linear.weight.dtype == x.dtype else layer.forward(x),
    ),
}


class Net(nn.Module):
    """Uses one block in each way, and never the last one; returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for make, _ in USES.values())
        self.layers.append(Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer, (_, use) in zip(self.layers, USES.values(), strict=False):
            x = x + use(layer, x) / len(USES)
        return x.float().square().mean()


@pytest.mark.parametrize("stage", range(4))
@ranks(2)
def test_they_train_as_in_one_process(stage, tmp_path):
    plain, rank = Net(), dist.get_rank()
    settings = dict(stage=stage, micro_batches=2, optimizer=SGD, gradient_clipping=0.0)
    engine = engine_of(Net(), **settings)
    with logged() as lines:
        for step in range(3):
            xs = torch.randn(4, 4, WIDTH, generator=torch.Generator().manual_seed(step))
            engine.eval()
            with torch.no_grad():
                near(engine(xs[0]), plain(xs[0]), "loss in evaluation")
            engine.train()
            for x in xs.chunk(2)[rank]:
                loss = engine(x)
                near(loss, plain(x), "loss")
                engine.backward(loss)
                engine.step()
            (sum(map(plain, xs)) / len(xs)).backward()
            with torch.no_grad():
                for parameter in plain.parameters():
                    if parameter.grad is not None:
                        parameter -= LR * parameter.grad
            plain.zero_grad()
            if step == 1:
                engine.save_checkpoint(tmp_path)
                engine = engine_of(Net(), **settings)
                engine.load_checkpoint(tmp_path)
    for name, weight in gathered_parameters(engine.module).items():
        near(weight, plain.get_parameter(name), name)
    said = [line for line in lines if "without calling these modules" in line]
    names = {name for line in said for name in re.findall(r"layers\.\d+", line)}
    indices = {name: f"layers.{index}" for index, name in enumerate(USES)}
    uncalled = {*USES} - {"holder", "dict", "only metadata", "clamped"}
    assert names == {indices[name] for name in uncalled}


class Stack(nn.Module):
    """Blocks that are called, or not."""

    def __init__(self, *, calls: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.calls, self.layers = calls, nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (layer(x) if self.calls else layer.half(x))
        return x.float().square().mean()


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@ranks(2)
def test_quantized_and_in_16_bit_they_give_the_same_digits_as_called_blocks(ranks_per_node):
    zero = {"zero_optimization": ALL_THREE, "zeropp": {"ranks_per_node": ranks_per_node}}

    def losses(*, calls: bool) -> list[float]:
        engine = engine_of(Stack(calls=calls), bf16={"enabled": True}, micro_batches=2, **zero)
        found = []
        for number in range(6):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found

    assert losses(calls=False) == losses(calls=True)


@pytest.mark.parametrize("compiles", [False, True], ids=["", "compiled"])
@ranks(2)
def test_two_backward_passes_through_one_graph_and_whole_models_compiled(compiles):
    class Both(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x) + (0 if compiles else layer.half(x))
            return x.square().mean()

    plain, x = Both(calls=True), torch.ones(4, WIDTH)
    (2 * plain(x)).backward()
    for stage in range(4):
        engine = engine_of(Both(calls=True), stage=stage, optimizer=SGD, gradient_clipping=0.0)
        loss = (torch.compile(engine, backend="eager") if compiles else engine)(x)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
        for name, weight in gathered_parameters(engine.module).items():
            expected = plain.get_parameter(name)
            near(weight, expected - LR * expected.grad, name)


# What programs ask tensors that they find, as profilers of memory, debuggers and checkpoints do.
QUESTIONS = (
    repr,
    format,
    dir,
    sys.getsizeof,
    pickle.dumps,
    torch.is_tensor,
    torch.is_floating_point,
    lambda each: torch.save(each, io.BytesIO()),
    lambda each: each.untyped_storage().nbytes(),
    lambda each: (each.nbytes, each.itemsize, each.element_size() * each.nelement()),
    lambda each: (each.storage_offset(), each.stride(), each.shape, each.is_contiguous()),
    lambda each: (each.is_cuda, each.is_pinned(), each.dim_order(), each.grad, each._version),
)


COMPUTING = (copy.deepcopy, torch.abs, lambda each: each.detach() + 1)


class Scanned(Stack):
    """Is asked about its weights in forward, before they are gathered."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [*self.layers.parameters()]
        self.seen += [each.detach() for each in self.seen]
        for each, ask in itertools.product(self.seen, QUESTIONS):
            ask(each)
        self.saved = self.layers[2].linear.state_dict()
        return super().forward(x)


@ranks(2)
def test_who_scans_tensors_gathers_nothing():
    called, engine = engine_of(Stack(calls=True)), engine_of(Scanned(calls=True))
    x = torch.ones(4, WIDTH)
    with logged() as lines:
        for _ in range(2):
            weights = gathered_parameters(engine.module.layers[2].linear)
            loss = engine(x)
            assert loss.item() == called(x).item()
            assert all(torch.equal(each, weights[n]) for n, each in engine.module.saved.items())
            for each in (engine, called):
                each.backward(each(x))
                each.step()
            for each, ask in itertools.product(engine.module.seen, (*QUESTIONS, *COMPUTING)):
                ask(each)
            assert all(isinstance(torch.abs(each), DTensor) for each in engine.module.seen)
    assert not [line for line in lines if "without calling" in line]


def near(actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    difference = (actual - expected).abs().max().item()
    assert difference <= NEAR, f"{where}: {difference}"


@pytest.mark.parametrize("kind", [Net, Stack])
@pytest.mark.parametrize("stage", [0, 3])
@ranks(2)
def test_a_method_of_the_model_trains_it_as_its_forward(stage, kind):
    class Scored(kind):
        def score(self, x: torch.Tensor) -> torch.Tensor:
            return kind.forward(self, x)

        def penalty(self, loss: torch.Tensor) -> torch.Tensor:
            assert not any(isinstance(each, DTensor) for each in self.parameters())
            return loss / 2

    losses, weights = [], []
    for calls in (True, False):
        torch.manual_seed(1)
        engine = engine_of(Scored(), stage=stage, micro_batches=2, optimizer=SGD)
        found = []
        xs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
        for number in range(4):
            loss = engine(xs) if calls else engine.module.score(xs)
            penalty = engine.penalty(loss) * 2
            if kind is Stack and number == 3:
                engine.backward(penalty, retain_graph=True)
            engine.backward(penalty)
            engine.step()
            found.append(loss.item())
            with torch.no_grad():
                found.append((engine if calls else engine.score)(xs).item())
        losses.append(found)
        weights.append(gathered_parameters(engine.module))
    assert losses[0] == losses[1] and losses[0][0] > losses[0][-1]
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())
