"""Muon against torch's, and on shards against row blocks of whole matrices in plain PyTorch."""

import math
import os
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of
from tests.zeropp.deepspeed.small_engine import run as train_engine
from tests.zeropp.prescribed_gradients import ALL_THREE, data_mesh, zero_config
from tests.zeropp.sharded_training import shard_on_nodes, step
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError, Sharding, ZeroConfig, optimizer_step, shard
from zeropp.capabilities.muon.blocks import Matrix, MatrixPart, plan_rounds, shard_rows
from zeropp.capabilities.muon.groups import groups_of, muon_options
from zeropp.capabilities.muon.matrix_step import MuonOptions
from zeropp.capabilities.muon.muon import Muon
from zeropp.capabilities.muon.newton_schulz import (
    JORDAN,
    SETS,
    coefficients_of,
    flops,
    orthogonalize,
    scale,
)
from zeropp.capabilities.muon.offloaded_muon import build_offloaded_muon
from zeropp.capabilities.offload.offloaded_adam import offloaded_adamw
from zeropp.optim.adam import FusedAdam
from zeropp.optim.step_or_skip import local_part
from zeropp.wire.rank_group import sum_of

DRAWS = int(os.environ.get("RANDOM_MUON", "6"))


def two_layers() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(24, 40, bias=False), nn.Linear(40, 16, bias=False)]
    return nn.Sequential(nn.ModuleList(layers))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    first, second = model[0]
    for number in range(steps):
        torch.manual_seed(100 + number)
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
    expected = two_layers()
    theirs = torch.optim.Muon(expected.parameters(), **settings)
    model = two_layers()
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_batch_is_each_matrix_by_itself(dtype):
    """Also one of zeros beside others; products of one matrix or of several round alike."""
    for shape in ((40, 24), (24, 40), (64, 96)):
        matrices = torch.randn(3, *shape).to(dtype)
        matrices[1] = 0
        each = torch.stack([orthogonalize(matrix, [JORDAN] * 5) for matrix in matrices])
        together = orthogonalize(matrices, [JORDAN] * 5)
        assert torch.equal(together, each) and not together[1].any()


def random_parts(draw: random.Random, rows: int, columns: int) -> Matrix:
    """A matrix of one to three parts, of several runs each."""
    kinds = [draw.randrange(3) for _ in range(draw.randint(1, 8))]
    bounds = sorted({0, rows, *(draw.randint(0, rows) for _ in kinds[1:])})
    runs: dict[int, list] = {}
    for kind, run in zip(kinds, zip(bounds, bounds[1:], strict=False), strict=False):
        runs.setdefault(kind, []).append(run)
    parts = [
        MatrixPart(runs=tuple(each), shape=(sum(stop - start for start, stop in each), columns))
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


def mesh_of(num_shards: int) -> tuple[DeviceMesh, list]:
    """The mesh of four ranks, and how it shards rows; two shards have two replicas, as in HSDP."""
    if num_shards == 4:
        return init_device_mesh("cpu", (4,)), [Shard(0)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return mesh, [Replicate(), Shard(0)]


def groups_of_rows(rows: int, num_shards: int, size: int) -> list[tuple[int, int]]:
    """The rows of each `size` consecutive shards."""
    chunks = [shard_rows(rows, num_shards, place) for place in range(num_shards)]
    starts = range(0, num_shards, size)
    return [(chunks[first][0], chunks[first + size - 1][1]) for first in starts]


@pytest.mark.parametrize("seed", range(DRAWS))
@ranks(4)
def test_blocks_on_shards_are_those_of_whole_matrices(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    per_node = draw.choice([1, 2, 2, 4])
    num_shards = draw.choice([4, 4, 2])
    blocks = draw.choice(["node", "node", "rank", "whole"])
    every = draw.choice([None, None, 2])
    group = {
        "lr": 0.1, "decay": draw.choice([0.0, 0.3]), "factor": draw.choice([1.0, 0.2]),
        "mode": draw.choice(["spectral", "unit_rms_norm", "shape_scaling"]),
        "ns": coefficients_of(draw.choice([*SETS]), 5),
    }  # fmt: skip
    momentum, nesterov = draw.choice([0.0, 0.9]), draw.random() < 0.5
    mesh, placements = mesh_of(num_shards)
    shapes = [(draw.randint(1, 40), draw.randint(1, 20)) for _ in range(draw.randint(1, 5))]
    layouts = [random_parts(draw, *shape) for shape in shapes]
    weights = [torch.randn(shape) for shape in shapes]
    shards = [nn.Parameter(distribute_tensor(each, mesh, placements)) for each in weights]
    vector = nn.Parameter(torch.ones(3))
    optimizer = Muon(
        [{"params": shards, "use_muon": True}, {"params": [vector], "use_muon": False}],
        lr=group["lr"], weight_decay=group["decay"], momentum=momentum, nesterov=nesterov,
        ns_coefficients=group["ns"], scale_mode=group["mode"], extra_scale_factor=group["factor"],
        options=MuonOptions(blocks=blocks, whole_every=every, dtype=torch.float32),
        config=ZeroConfig.from_json({"zeropp": {"ranks_per_node": per_node}}),
        parts=dict(zip(shards, layouts, strict=True)),
    )  # fmt: skip
    buffers, counts = [torch.zeros(shape) for shape in shapes], [0] * len(shapes)
    for number in range(3):
        vector.grad = torch.ones(3)
        group["lr"] = 0.1 / (1 + number)
        for each in optimizer.param_groups:
            each["lr"] = group["lr"]
        for index, (shape, layout) in enumerate(zip(shapes, layouts, strict=True)):
            gradient = torch.randn(shape)
            if every is not None and draw.random() < 0.2:
                shards[index].grad = None
                continue
            counts[index] += 1
            is_whole = every is not None and counts[index] % every == 0
            size = {"node": min(per_node, num_shards), "rank": 1, "whole": num_shards}[
                "whole" if is_whole else blocks
            ]
            shards[index].grad = distribute_tensor(gradient, mesh, placements)
            buffers[index].lerp_(gradient, 1 - momentum)
            ahead = gradient.lerp(buffers[index], momentum)
            direction = ahead if nesterov else buffers[index]
            groups = groups_of_rows(shape[0], num_shards, size)
            weights[index] = moved(weights[index], direction, layout, groups, group)
        optimizer.step()
    # Iterations multiply the smallest singular values, and rounding errors beside them, by a.
    grown = math.prod(a for a, _, _ in group["ns"]) * 2**-22
    atol = 3 * 0.1 * group["factor"] * math.sqrt(40) * grown
    for mine, weight in zip(shards, weights, strict=True):
        torch.testing.assert_close(mine.full_tensor(), weight, rtol=1e-5, atol=atol)
    if every is None:
        sent = {key: number for key, number in optimizer.ledger.sent.items() if number}
        expected = sum_of(optimizer.messages())
        assert sent == {key: 3 * number for key, number in expected.items() if number}


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


def test_values_out_of_range_are_named():
    with pytest.raises(InputError, match=r"momentum = 1.5, ns_steps = 0"):
        muon_options(
            momentum=1.5, nesterov=True, ns_coefficients=JORDAN, ns_steps=0, eps=1e-7,
            scale_mode="spectral", extra_scale_factor=1.0,
        )  # fmt: skip


@ranks(4)
def test_nothing_more_crosses_nodes_than_with_adamw():
    """In nodes, the ledger is the forecast, to the byte; a rank owns at most half of the work."""
    config = zero_config(ALL_THREE, 2, zeropp={"code_messages": False})
    ledgers = []
    for kind in (torch.optim.AdamW, Muon):
        sharding = shard(small_model(), data_mesh(), config)
        options = {"config": config} if kind is Muon else {}
        optimizer = kind(sharding.model if kind is Muon else sharding.model.parameters(), **options)
        for number in range(2):
            step(sharding, optimizer, number)
        ledgers.append(sharding.traffic.sent)
    assert ledgers[0] == ledgers[1]
    sent, expected = optimizer.ledger.sent, sum_of(optimizer.messages())
    assert sent["optimizer", "across_nodes"] == 0
    assert sent["optimizer", "in_node"] == 2 * expected["optimizer", "in_node"] > 0


@ranks(4)
def test_a_step_that_is_skipped_changes_nothing():
    sharding = shard_on_nodes({"stage": 2})
    optimizer = Muon(sharding.model, config=zero_config({"stage": 2}, 2))
    step(sharding, optimizer, 0)
    before = {name: each.full_tensor() for name, each in sharding.model.state_dict().items()}
    loss = loss_of(sharding.model, tokens_of(0)) * (math.inf if dist.get_rank() == 1 else 1.0)
    loss.backward()
    assert optimizer_step(optimizer, sharding, clip_grad=1.0).skipped
    optimizer.settle()
    for name, each in sharding.model.state_dict().items():
        assert torch.equal(each.full_tensor(), before[name])
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    step(sharding, optimizer, 1)
    optimizer.settle()
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


@ranks(2)
def test_deepspeeds_json_names_it():
    """Its parameters reach the groups, and matrices outside of blocks are AdamW's."""
    params = {"lr": 1e-2, "momentum": 0.8, "nesterov": False, "betas": [0.8, 0.9], "eps": 1e-6}
    engine = engine_of(optimizer={"type": "Muon", "params": params}, zeropp={"muon_blocks": "rank"})
    numbers = train_engine(engine, 3)
    optimizer = engine.optimizer
    of_muon, of_adam = optimizer.param_groups
    assert of_muon["use_muon"] and len(of_muon["params"]) == 4
    assert (of_muon["momentum"], of_muon["nesterov"], of_muon["eps"]) == (0.8, False, 1e-7)
    assert (of_adam["betas"], of_adam["eps"], of_adam["lr"]) == ((0.8, 0.9), 1e-6, 1e-2)
    assert engine.module.embedding.weight.shape in [each.shape for each in of_adam["params"]]
    assert optimizer.matrices.options.blocks == "rank" and numbers[2] < numbers[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3, "offload"])
@ranks(4)
def test_a_matrix_has_four_bytes_of_state_where_adam_has_eight(stage):
    """Counted in the storages of this rank's shards, after a step."""
    zero = {"stage": stage} if stage != "offload" else {"stage": 2} | OFFLOADED
    held = {}
    for kind in ("adam", "muon"):
        sharding = shard_on_nodes(zero)
        optimizer = optimizer_of(sharding, kind, zero)
        step(sharding, optimizer, 0)
        masters = getattr(optimizer, "masters", {})
        matrices, _ = groups_of(sharding.model)
        owned = [masters.get(each, each) for each in matrices["params"]]
        states = [optimizer.state[each].values() for each in owned]
        tensors = [local_part(each) for state in states for each in state if each.ndim]
        storages = {each.data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        held[kind] = sum(storages.values())
        elements = sum(local_part(each).numel() for each in owned)
    assert (held["muon"], held["adam"]) == (4 * elements, 8 * elements)


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


def optimizer_of(sharding: Sharding, kind: str, zero: dict) -> torch.optim.Optimizer:
    """AdamW or Muon of a sharded model, on the host where the JSON says so."""
    config, device = zero_config(zero, 2), torch.device("cpu")
    adam = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.0, "eps": 1e-8}
    of_muon = {
        "momentum": 0.9, "nesterov": True, "ns_coefficients": JORDAN, "ns_steps": 5,
        "scale_mode": "spectral", "extra_scale_factor": 0.2,
    }  # fmt: skip
    groups = groups_of(sharding.model)
    if kind == "adam" and OFFLOADED.items() <= zero.items():
        return offloaded_adamw(sharding, groups, device, config, **adam)
    if kind == "adam":
        return FusedAdam(groups, **adam)
    of_muon |= {"options": MuonOptions(), "parts": {}}
    if OFFLOADED.items() <= zero.items():
        return build_offloaded_muon(sharding, groups, device, config, adam, **of_muon)
    return Muon(groups, config=config, adam_eps=adam.pop("eps"), **adam, **of_muon)
