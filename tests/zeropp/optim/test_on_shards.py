"""All of PyTorch's optimizers train shards as whole weights, or are refused by name."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import config_of, logged, run, run_without_engine
from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError, optimizer_step, shard
from zeropp.optim.adam import fastest_adamw

UNNAMED = config_of() | {"optimizer": {}}
REFUSED = ("Adafactor", "LBFGS", "Rprop", "SparseAdam")
OTHERS = ("Optimizer", "Adam", "AdamW", "Muon")  # tested elsewhere; Muon takes matrices only


@ranks(2)
def test_pytorchs_optimizers():
    """3 steps of elementwise operations: 3 * 64 * 2^-24 = 1.2e-5, as in test_engine."""
    names = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    for name in sorted(names - {*REFUSED, *OTHERS}):
        kind = getattr(torch.optim, name)
        expected, *_ = run_without_engine(3, lambda model, kind=kind: kind(model.parameters()))
        engine, *_ = zeropp.initialize(model=small_model(), optimizer=kind, config=UNNAMED)
        assert run(engine, 3) == pytest.approx(expected, rel=1.2e-5), name


@pytest.mark.parametrize("has_scalar", [True, False])
@ranks(2)
def test_calls_for_many_parameters_at_once(has_scalar):
    """`foreach` and `fused` are switched off where PyTorch does not take all in one call.

    Results are those of the loop, but for the order of sums in fused kernels, as above.
    """
    for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW):
        numbers = []
        for option in ({}, {"foreach": True}, {"fused": True}):
            model = small_model()
            if has_scalar:  # 0-d parameters are whole on each rank
                model.embedding.register_parameter("gain", nn.Parameter(torch.tensor(0.5)))
                model.embedding.register_forward_hook(lambda each, _, x: x * each.gain)
            optimizer = partial(kind, lr=1e-2, **option)
            with logged() as lines:
                engine, *_ = zeropp.initialize(model=model, optimizer=optimizer, config=UNNAMED)
            is_said = any("has no effect on" in line for line in lines)
            is_fused = "fused" in option and kind is not torch.optim.AdamW
            assert is_said == (bool(option) and (has_scalar or is_fused)), lines
            numbers.append(run(engine, 3))
        for each in numbers[1:]:
            assert each == pytest.approx(numbers[0], rel=1.2e-5), kind


@ranks(2)
def test_optimizers_that_cannot_update_shards():
    for name in REFUSED:
        kind = getattr(torch.optim, name)
        message = f"{name} cannot update sharded weights"
        with pytest.raises(InputError, match=message):
            zeropp.initialize(model=small_model(), optimizer=kind, config=UNNAMED)
        model = small_model()
        with pytest.raises(InputError, match=message):
            zeropp.initialize(model=model, optimizer=kind(model.parameters()), config=UNNAMED)
    sharding = shard(small_model(), data_mesh(), zero_config({"stage": 1}))
    optimizer = torch.optim.Rprop(sharding.model.parameters())
    with sharding.micro_step(last=True):
        loss_of(sharding.model, tokens_of(0)).backward()
    with pytest.raises(InputError, match="Rprop cannot update sharded weights"):
        optimizer_step(optimizer, sharding)


@ranks(1)
def test_one_rank_without_shards_takes_them():
    engine, *_ = zeropp.initialize(model=small_model(), optimizer=torch.optim.Rprop, config=UNNAMED)
    assert len(run(engine, 2)) == 2


@ranks(2)
def test_adamw_of_pytorch_takes_matrices_that_are_split_beside_biases_that_are_not():
    """As tensor parallelism has them where no data axis shards the biases."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = {name: (torch.randn(4, 2), torch.randn(2)) for name in ("weights", "gradients")}
    split = {
        name: (distribute_tensor(matrix, mesh, [Shard(0)]), bias)
        for name, (matrix, bias) in whole.items()
    }
    trained = []
    for tensors in (whole, split):
        parameters = [torch.nn.Parameter(tensor.clone()) for tensor in tensors["weights"]]
        for parameter, gradient in zip(parameters, tensors["gradients"], strict=True):
            parameter.grad = gradient
        fastest_adamw(
            parameters, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, torch_on_cpu=True
        ).step()
        trained.append(parameters)
    (expected_matrix, expected_bias), (trained_matrix, trained_bias) = trained
    torch.testing.assert_close(trained_bias, expected_bias)
    torch.testing.assert_close(trained_matrix.full_tensor(), expected_matrix)
