"""Means over nodes: alike to the bit on all of them, and what rounding loses comes back later."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ranks import ranks
from tests.worlds import worlds
from zeropp.capabilities.local_sgd.outer_mean import OuterMean

CPU = torch.device("cpu")
# Root mean square of the error of a mean of normal numbers. The codes of a block of 128, or 256,
# numbers reach to about 3.3 of their standard deviation: a step is that / 7, or / 127, and
# its error 0.29 steps: 0.14 and 0.008, once for the means and, over 2 for 4 of them, for the terms.
# With two bits it is 0.36 of it.
ERRORS = {2: 0.42, 4: 0.16, 8: 0.01, 32: 1e-6}


@ranks(4)
@pytest.mark.parametrize(
    ("bits", "feeds"), [(2, None), (2, False), (4, None), (4, True), (8, None), (32, None)]
)
def test_random_tensors_on_four_nodes(bits: int, feeds: bool | None, tmp_path: Path) -> None:
    with worlds(1, tmp_path) as group:
        draw = random.Random(bits)
        for _ in range(8):
            sizes = [draw.choice([0, 1, 31, 128, 200, 1000]) for _ in range(draw.randint(1, 4))]
            generator = torch.Generator().manual_seed(draw.randrange(1000))
            nodes = [[torch.randn(n, generator=generator) for n in sizes] for _ in range(4)]
            _require_means([[*each, each[0].clone()] for each in nodes], bits, feeds, group)


def _require_means(nodes: list[list[Tensor]], bits: int, feeds: bool | None, group) -> None:
    """Form the means of tensors of four nodes, of which the first and the last are equal."""
    tensors, seen, returned = nodes[group.node], [], []
    mean = OuterMean([len(each) for each in tensors], group, bits, CPU, feeds=feeds)

    def update(own: Tensor) -> Tensor:
        seen.append(own)
        return own

    for _ in range(3):
        means = mean.run(tensors, update)
        contents = group.gather([each.numpy().tobytes() for each in means])
        assert contents == [contents[0]] * 4
        assert torch.equal(means[0], means[-1])  # as tied weights stay
        returned.append(mean.own(means))
    left = sum(seen) - sum(returned)
    assert torch.allclose(left, mean.error, atol=1e-5)
    assert torch.equal(mean.own(mean.spread(seen[0])), seen[0])
    first = [sum(each) / 4 for each in zip(*nodes, strict=True)]
    if mean.feeds:  # senders' errors come back too, so that those of three times add up to one
        unsent = group.gather(torch.cat([*mean.joined(mean.unsent), torch.zeros(0)]))
        total = mean.joined(group.gather(sum(seen)))
        expected = 3 * torch.cat(first) - sum(unsent) / 4
        assert torch.allclose(torch.cat(total), expected, atol=1e-4)
    means = OuterMean([len(each) for each in tensors], group, bits, CPU).run(tensors)
    error = torch.cat(means) - torch.cat(first)
    if error.numel():
        assert error.square().mean().sqrt() < ERRORS[bits] * (2 if len(error) < 100 else 1)


@ranks(2)
@pytest.mark.parametrize("bits", [2, 4, 8, 32])
def test_an_overflow_on_one_node_is_seen_by_all_and_leaves_nothing(
    bits: int, tmp_path: Path
) -> None:
    """As of gradients in fp16, a step with which is skipped."""
    with worlds(1, tmp_path) as group:
        tensor = torch.randn(1000, generator=torch.Generator().manual_seed(group.node))
        mean = OuterMean([1000], group, bits, CPU)
        for value in (float("inf"), float("nan")):
            for place in (3, 900):  # of each owner
                overflown = tensor.clone()
                overflown[place] = value if group.node else 1.0
                (got,) = mean.run([overflown])
                assert not got[place].isfinite()
        (got,) = mean.run([tensor])
        assert got.isfinite().all()


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_every_element_has_one_owner(nodes: int) -> None:
    sizes = [0, 1, 31, 129, 1000, 70000]

    class Alone:
        """A group of which nothing is asked but its size."""

        node, size = 0, nodes

    whole = [torch.arange(size) for size in sizes]
    mean = OuterMean(sizes, Alone(), 8, CPU)
    owned = [mean.own([each + 1.0 for each in whole], owner) for owner in range(nodes)]
    elements = torch.cat([each[each > 0] for each in owned])
    expected = torch.cat([each + 1.0 for each in whole])
    assert torch.equal(elements.sort().values, expected.sort().values)
