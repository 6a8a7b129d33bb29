"""Norms over shards and copies equal those of the whole tensors."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_zpp.monitor.optimizer_norms import optimizer_norms
from tests.ranks import ranks


def trained(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.arange(10.0).reshape(2, 5) + step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(5, 3)  # 3 rows on 4 ranks: one rank holds nothing


def test_norms_are_those_of_all_elements():
    optimizer = trained(model())
    norms_by_kind = optimizer_norms(optimizer)
    flat = {
        kind: torch.cat([read(parameter).flatten() for parameter in optimizer.state])
        for kind, read in {
            "weight": lambda parameter: parameter.detach(),
            "momentum": lambda parameter: optimizer.state[parameter]["exp_avg"],
            "variance": lambda parameter: optimizer.state[parameter]["exp_avg_sq"],
            "variance_sqrt": lambda parameter: optimizer.state[parameter]["exp_avg_sq"].sqrt(),
        }.items()
    }
    assert len(norms_by_kind) == 4 * 3
    for kind, values in flat.items():
        norms = {"l1": 1, "l2": 2, "abs_max": float("inf")}
        for name, order in norms.items():
            expected = torch.linalg.vector_norm(values, order).item()
            assert norms_by_kind[kind, name] == pytest.approx(expected, rel=1e-6)


def test_moments_that_do_not_exist_yet_are_nothing():
    norms = optimizer_norms(torch.optim.AdamW(model().parameters()))
    assert norms["momentum", "l2"] == 0
    assert norms["weight", "l2"] > 0


@ranks(4)
def test_shards_and_copies_count_once():
    whole = optimizer_norms(trained(model()))  # four copies
    shapes = {(4,): ("all",), (2, 2): ("copies", "shards")}
    for shape, names in shapes.items():
        sharded = model()
        fully_shard(sharded, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        assert optimizer_norms(trained(sharded)) == pytest.approx(whole, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_part_on_the_host_counts_too():
    expected = optimizer_norms(trained(model()))
    optimizer = trained(model())
    _, bias = optimizer.param_groups[0]["params"]
    for tensor in (bias, *optimizer.state[bias].values()):
        tensor.data = tensor.data.to("cuda")
    assert optimizer_norms(optimizer) == pytest.approx(expected)
