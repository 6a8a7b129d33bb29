"""Layers that ranks split compute what whole ones do."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_zpp.model.loss import chunked_cross_entropy, parallel_cross_entropy
from megatron_zpp.model.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron_zpp.parallel.axes import TensorAxis
from tests.ranks import ranks
from zeropp.optim.step_or_skip import local_part
from zeropp.wire.rank_group import AXES, Nodes, RankGroup
from zeropp.wire.traffic import Traffic


def axis_of_two() -> TensorAxis:
    """The tensor axis of a test's two ranks."""
    group = RankGroup(
        members=(0, 1), position=dist.get_rank(), nodes=Nodes(num_ranks=2, ranks_per_node=2),
        purpose="tensor", ledger=Traffic(AXES), group=dist.group.WORLD,
    )  # fmt: skip
    mesh = init_device_mesh("cpu", (2,))
    return TensorAxis(group=group, sequence_parallel=True, mesh=mesh)


def own(whole: torch.Tensor, dim: int | None) -> torch.Tensor:
    """This rank's half of a tensor."""
    return whole if dim is None else whole.chunk(2, dim)[dist.get_rank()]


def filled(layer: nn.Module, source: nn.Module) -> nn.Module:
    """A layer with its parts of the parameters of a whole one."""
    values = dict(source.named_parameters())
    for name, parameter in layer.named_parameters():
        assert parameter.shape == values[name].shape
        local_part(parameter.data).copy_(own(values[name].data, layer.split_dims.get(name)))
    return layer


@pytest.mark.parametrize("splits_rows", [False, True])
@ranks(2)
def test_layers_that_are_split_compute_what_whole_ones_do(splits_rows):
    """Into channels and out of them again, forward and backward."""
    torch.manual_seed(0)
    axis, rows = axis_of_two(), 1 if splits_rows else None
    first, second = nn.Linear(6, 8), nn.Linear(8, 6)
    x = torch.randn(2, 4, 6, requires_grad=True)
    expected = second(first(x))
    expected.square().sum().backward()
    column = filled(ColumnParallelLinear(6, 8, True, axis), first)
    row = filled(RowParallelLinear(8, 6, True, axis), second)
    own_x = own(x.detach(), rows).clone().requires_grad_()
    y = row(column(axis.enter(own_x, splits_rows)), splits_rows)
    y.square().sum().backward()
    torch.testing.assert_close(y, own(expected, rows))
    torch.testing.assert_close(own_x.grad, own(x.grad, rows))
    torch.testing.assert_close(local_part(column.weight.grad), own(first.weight.grad, 0))
    torch.testing.assert_close(local_part(row.weight.grad), own(second.weight.grad, 1))


@ranks(2)
def test_a_vocabulary_that_is_split_is_looked_up_and_predicted_as_a_whole():
    torch.manual_seed(0)
    axis, tokens = axis_of_two(), torch.randint(10, (2, 5))
    table = nn.Embedding(10, 6)
    assert torch.equal(filled(VocabParallelEmbedding(10, 6, axis), table)(tokens), table(tokens))
    logits, labels, mask = torch.randn(7, 10), torch.randint(10, (7,)), torch.rand(7)
    part = own(logits, 1).clone()
    losses = parallel_cross_entropy(part, labels, mask, axis.group)
    torch.testing.assert_close(losses, chunked_cross_entropy(logits, labels, mask))
    torch.testing.assert_close(part, own(logits, 1))  # both are gradients now


@ranks(2)
def test_the_ranks_drop_other_elements():
    torch.manual_seed(3)
    with axis_of_two().own_random_numbers(torch.device("cpu")):
        own_numbers = torch.rand(4).tolist()
    shared = torch.rand(4).tolist()
    everywhere = [None, None]
    dist.all_gather_object(everywhere, (own_numbers, shared))
    (first, same), (second, same_again) = everywhere
    assert first != second and same == same_again != own_numbers
