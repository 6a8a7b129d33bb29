"""Muon against torch's, and on shards against row blocks of whole matrices in plain PyTorch."""

import math
import os
import random

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks import ranks
from zeropp import InputError, ZeroConfig
from zeropp.optim.muon.blocks import Matrix, Part, plan_rounds, shard_rows
from zeropp.optim.muon.matrix_step import MuonOptions
from zeropp.optim.muon.muon import Muon, muon_options
from zeropp.optim.muon.newton_schulz import (
    JORDAN,
    SETS,
    coefficients_of,
    flops,
    orthogonalize,
    scale,
)

DRAWS = int(os.environ.get("RANDOM_MUON", "6"))


def small_model() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(24, 40, bias=False), nn.Linear(40, 16, bias=False)]
    return nn.Sequential(nn.ModuleList(layers))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    first, second = model[0]
    for step in range(steps):
        torch.manual_seed(100 + step)
        second(torch.tanh(first(torch.randn(8, 24)))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.02},
        {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"lr": 0.01, "momentum": 0.8, "nesterov": False, "ns_steps": 3},
    ],
)
def test_one_rank_is_torchs(settings):
    expected = small_model()
    theirs = torch.optim.Muon(expected.parameters(), **settings)
    model = small_model()
    ours = Muon(model, **settings, options=MuonOptions(dtype=torch.bfloat16))
    for mine, other in zip(train(model, ours, 20), train(expected, theirs, 20), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", SETS)
def test_singular_values_come_close_to_one(name):
    torch.manual_seed(0)
    coefficients = coefficients_of(name, max(5, len(SETS[name])))
    for shape in ((40, 24), (24, 40), (1, 7)):
        matrix = orthogonalize(torch.randn(shape), coefficients)
        values = torch.linalg.svdvals(matrix)
        assert 0.5 < values.min() and values.max() < 1.3, (shape, values)
    assert not orthogonalize(torch.zeros(3, 5), coefficients).any()


def random_parts(draw: random.Random, rows: int, columns: int) -> Matrix:
    """A matrix of one to three parts, of several runs each."""
    kinds = [draw.randrange(3) for _ in range(draw.randint(1, 8))]
    bounds = sorted({0, rows, *(draw.randint(0, rows) for _ in kinds[1:])})
    runs: dict[int, list] = {}
    for kind, run in zip(kinds, zip(bounds, bounds[1:], strict=False), strict=False):
        runs.setdefault(kind, []).append(run)
    parts = [
        Part(runs=tuple(each), shape=(sum(stop - start for start, stop in each), columns))
        for each in runs.values()
    ]
    return Matrix(shape=(rows, columns), parts=tuple(parts))


def moved(
    weight: torch.Tensor, direction: torch.Tensor, matrix: Matrix, groups: list, group: dict
) -> torch.Tensor:
    """The weight after a step in which the rows of each of `groups` are blocks of their parts."""
    update = torch.zeros_like(weight)
    for first, end in groups:
        for part in matrix.parts:
            rows = [
                row for start, stop in part.runs for row in range(start, stop) if first <= row < end
            ]
            if rows:
                factor = group["factor"] * scale(part.shape, group["mode"])
                update[rows] = orthogonalize(direction[rows], group["ns"]) * factor
    return weight * (1 - group["lr"] * group["decay"]) - group["lr"] * update


@pytest.mark.parametrize("seed", range(DRAWS))
@ranks(4)
def test_blocks_on_shards_are_those_of_whole_matrices(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    per_node = draw.choice([1, 2, 2, 4])
    blocks = draw.choice(["node", "node", "rank", "whole"])
    every = draw.choice([None, None, 2])
    group = {
        "lr": 0.1, "decay": draw.choice([0.0, 0.3]), "factor": draw.choice([1.0, 0.2]),
        "mode": draw.choice(["spectral", "unit_rms_norm", "shape_scaling"]),
        "ns": coefficients_of(draw.choice([*SETS]), 5),
    }  # fmt: skip
    momentum, nesterov = draw.choice([0.0, 0.9]), draw.random() < 0.5
    mesh = init_device_mesh("cpu", (4,))
    shapes = [(draw.randint(1, 40), draw.randint(1, 20)) for _ in range(draw.randint(1, 5))]
    layouts = [random_parts(draw, *shape) for shape in shapes]
    weights = [torch.randn(shape) for shape in shapes]
    shards = [nn.Parameter(distribute_tensor(each, mesh, [Shard(0)])) for each in weights]
    vector = nn.Parameter(torch.ones(3))
    optimizer = Muon(
        [{"params": shards, "use_muon": True}, {"params": [vector], "use_muon": False}],
        lr=group["lr"], weight_decay=group["decay"], momentum=momentum, nesterov=nesterov,
        ns_coefficients=group["ns"], scale_mode=group["mode"], extra_scale_factor=group["factor"],
        options=MuonOptions(blocks=blocks, whole_every=every, dtype=torch.float32),
        config=ZeroConfig.from_json({"zeropp": {"ranks_per_node": per_node}}),
        parts=dict(zip(shards, layouts, strict=True)),
    )  # fmt: skip
    buffers = [torch.zeros(shape) for shape in shapes]
    for step in range(3):
        is_whole = every is not None and (step + 1) % every == 0
        mode = "whole" if is_whole else blocks
        size = {"node": per_node, "rank": 1, "whole": 4}[mode]
        vector.grad = torch.ones(3)
        for index, (shape, layout) in enumerate(zip(shapes, layouts, strict=True)):
            gradient = torch.randn(shape)
            shards[index].grad = distribute_tensor(gradient, mesh, [Shard(0)])
            buffers[index].lerp_(gradient, 1 - momentum)
            direction = buffers[index]
            direction = gradient.lerp(direction, momentum) if nesterov else direction
            chunks = [shard_rows(shape[0], 4, position) for position in range(4)]
            groups = [
                (chunks[first][0], chunks[first + size - 1][1]) for first in range(0, 4, size)
            ]
            weights[index] = moved(weights[index], direction, layout, groups, group)
        optimizer.step()
    # Iterations multiply the smallest singular values, and rounding errors beside them, by a.
    grown = math.prod(a for a, _, _ in group["ns"]) * 2**-22
    atol = 3 * group["lr"] * group["factor"] * math.sqrt(40) * grown
    for shard, weight in zip(shards, weights, strict=True):
        torch.testing.assert_close(shard.full_tensor(), weight, rtol=1e-5, atol=atol)
    sent = optimizer.matrices.traffic.sent
    assert sent["optimizer", "across_nodes"] == 0 or blocks == "whole" or every


def test_work_is_dealt_out_evenly_and_each_row_once():
    draw = random.Random(0)
    for _ in range(100):
        matrices = [
            random_parts(draw, draw.randint(1, 300), draw.randint(1, 100))
            for _ in range(draw.randint(1, 12))
        ]
        shards, size = draw.choice([(1, 1), (4, 2), (8, 4), (6, 3)])
        first = size * draw.randrange(shards // size)
        members = range(first, first + size)
        blocks = [block for each in plan_rounds(matrices, shards, members, 2**10) for block in each]
        for index, matrix in enumerate(matrices):
            for place, member in enumerate(members):
                start, stop = shard_rows(matrix.shape[0], shards, member)
                rows = [
                    row
                    for block in blocks
                    if block.matrix == index
                    for run in block.runs[place]
                    for row in range(*run)
                ]
                assert sorted(rows) == [*range(stop - start)]
        work = [sum(block.work for block in blocks if block.owner == each) for each in range(size)]
        assert max(work) - min(work) <= max((block.work for block in blocks), default=0)
    assert flops(10, 4) == flops(4, 10) == 5 * (4 * 16 * 10 + 2 * 64)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"params": [torch.nn.Parameter(torch.ones(3))], "use_muon": True}], "shape \\[3\\]"),
        ([{"params": [torch.nn.Parameter(torch.ones(3, 3))]}], "no use_muon"),
        ([], "no parameters"),
        (nn.Linear(3, 3), "nn.ModuleList"),
    ],
)
def test_what_muon_cannot_take_is_named(groups, message):
    with pytest.raises(InputError, match=message):
        Muon(groups)


def test_values_out_of_range_are_named():
    with pytest.raises(InputError, match=r"momentum = 1.5, ns_steps = 0"):
        muon_options(
            momentum=1.5, nesterov=True, ns_coefficients=JORDAN, ns_steps=0, eps=1e-7,
            scale_mode="spectral", extra_scale_factor=1.0,
        )  # fmt: skip
