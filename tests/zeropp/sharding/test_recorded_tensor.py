"""Recorded tensors materialize to the same bits as tensors that are made at once."""

import copy

import pytest
import torch
from torch import nn

import zeropp
from zeropp import InputError
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding import shard
from zeropp.sharding.recorded_tensor import RecordedTensor, recording

COPIED = ("from_list", "norm.num_batches_tracked")  # made from numbers that are there already


class Initialized(nn.Module):
    """Most ways in which modules give their parameters values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        nn.init.orthogonal_(self.linear.weight)
        with torch.no_grad():
            self.linear.weight[0].fill_(3.0)
            self.linear.weight.data.mul_(2)
        self.linear.bias.data = torch.full((7,), 2.0)
        self.scale = nn.Parameter(torch.ones(3) * 0.5)
        self.from_list = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        own = torch.Generator().manual_seed(9)
        self.drawn = nn.Parameter(torch.randn(4, generator=own))
        nn.init.trunc_normal_(self.drawn, generator=own)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).view(1, 4, 4), persistent=False)
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.listed = torch.linspace(0, 1, 3).tolist()
        self.copies = nn.ModuleList(copy.deepcopy(nn.Linear(3, 3)) for _ in range(2))
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.copies[0].weight
        self.embedding = nn.Embedding(4, 3, padding_idx=1)
        nn.init.sparse_(self.embedding.weight, 0.3)
        self.norm = nn.BatchNorm1d(3)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16)
        self.apply(self.again)

    @staticmethod
    def again(module: nn.Module) -> None:
        """A second initialization, as Hugging Face's models have it."""
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_every_tensor_and_the_generator_are_as_without_recording():
    torch.manual_seed(3)
    plain = Initialized()
    after = torch.rand(3)
    torch.manual_seed(3)
    with recording():
        model = Initialized()
    assert torch.equal(torch.rand(3), after)
    assert (model.rates, model.listed) == (plain.rates, plain.listed)
    assert model.tied.weight is model.copies[0].weight
    later = tensors_of(model)
    for name, expected in tensors_of(plain).items():
        recorded = later[name]
        assert isinstance(recorded, RecordedTensor) != (name in COPIED)
        assert isinstance(recorded, nn.Parameter) == isinstance(expected, nn.Parameter)
        assert (recorded.requires_grad, recorded.dtype) == (expected.requires_grad, expected.dtype)
        assert torch.equal(
            recorded.materialize() if isinstance(recorded, RecordedTensor) else recorded, expected
        )
    assert torch.equal(torch.rand(3), torch.rand(3)) is False  # making them did not reseed


def test_recording_a_terabyte_allocates_nothing():
    with recording():
        model = nn.Linear(1, 2**38, bias=False, device="meta")
        weight = nn.Parameter(torch.empty(2**38))
        nn.init.zeros_(weight)
    assert weight.shape == (2**38,) and type(model.weight) is nn.Parameter


def test_writes_after_the_block_are_recorded_too():
    with recording():
        weight = nn.Parameter(torch.zeros(3))
    values = torch.tensor([1.0, 2.0, 3.0])
    with torch.no_grad():
        weight.add_(values)
        values.zero_()
        values += weight
    assert weight.materialize().tolist() == values.tolist() == [1.0, 2.0, 3.0]
    assert repr(weight) == "RecordedTensor(shape=[3], dtype=torch.float32)"


def foreach_and_out() -> list[torch.Tensor]:
    """Tensors that were written through lists and through `out=`, and one made from them."""
    first, second, third = torch.ones(3), torch.rand(4), torch.ones(2, 3)
    torch._foreach_mul_([first, second], [2.0, 3.0])
    torch._foreach_add_([first, second], 1.0)
    sums = torch._foreach_add([first, second], 5.0)
    torch._foreach_copy_([first], [torch.arange(3.0)])
    torch.add(first, 1.0, out=third[0])
    torch.rand(3, out=third[1])
    torch._foreach_zero_([second])
    return [first, second, third, *sums]


def test_lists_of_tensors_and_out_arguments():
    torch.manual_seed(3)
    expected = foreach_and_out()
    torch.manual_seed(3)
    with recording():
        recorded = foreach_and_out()
    for tensor, plain in zip(recorded, expected, strict=True):
        assert isinstance(tensor, RecordedTensor) and torch.equal(tensor.materialize(), plain)


def test_a_list_that_is_partly_recorded_is_refused():
    plain = torch.ones(3)
    with recording():
        weight = torch.zeros(3)
    with pytest.raises(InputError, match="_foreach_add_.* cannot be recorded"):
        torch._foreach_add_([plain, weight], 1.0)


def test_values_that_python_needs_are_computed():
    with recording():
        positions = torch.arange(4)
        odd = positions[positions % 2 == 1]
        assert bool(positions[3] > 2) and torch.equal(positions, positions.clone())
    assert odd.tolist() == [1, 3]


def test_data_of_another_shape_and_dtype_is_recorded():
    torch.manual_seed(3)
    plain = nn.Linear(3, 2).bfloat16()
    torch.manual_seed(3)
    with recording():
        weight = nn.Parameter(torch.zeros(3))
        weight.data = torch.arange(2.0, dtype=torch.float64)
        layer = nn.Linear(3, 2)
        kept = layer.weight
        layer.bfloat16()
    assert (weight.shape, weight.dtype) == ((2,), torch.float64)
    assert weight.materialize().tolist() == [0, 1]
    assert layer.weight is kept and kept.dtype == torch.bfloat16 and kept.requires_grad
    assert torch.equal(kept.materialize(), plain.weight.detach())


class WithBuffers(nn.Module):
    """A buffer that is saved, one that is not, and one that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("saved", torch.arange(3.0))
        self.register_buffer("unsaved", torch.arange(4.0), persistent=False)
        self.layer.register_buffer("shared", self.saved)


def test_buffers_stay_persistent_or_not_and_tied():
    with recording():
        model = WithBuffers()
    zeropp.shard(model, None, ZeroConfig())
    assert [*model.state_dict()] == [*WithBuffers().state_dict()]
    assert model.layer.shared is model.saved and type(model.saved) is torch.Tensor
    assert model.saved.tolist() == [0, 1, 2] and model.unsaved.tolist() == [0, 1, 2, 3]


def test_a_buffer_is_materialized_while_a_collective_still_holds_what_it_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a thread of gloo does for a moment after the broadcast; here autograd holds it."""
    with recording():
        module = nn.Module()
        module.register_buffer("scales", torch.arange(3.0))
    held = []

    def materialized(recorded: torch.Tensor, *_: object) -> torch.Tensor:
        whole = recorded.materialize()
        held.append(torch.ones(3, requires_grad=True) * whole)
        return whole

    monkeypatch.setattr(shard, "_broadcast_materialized", materialized)
    with shard.recorded_as_meta(module, None, torch.device("cpu")):
        pass
    assert torch.equal(module.scales, torch.arange(3.0)) and type(module.scales) is torch.Tensor
