"""Adam's op in PyTorch: its scalars, schemas, and the arguments that it refuses."""

import ctypes

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.zeropp.optim.adam_checks import (
    ADAM,
    ADAMW,
    arrays_of,
    assert_same_bits,
    copied,
    edge_arrays,
)
from zeropp.optim.adam_op import Arrays, adam, kernel_for, reference


def test_the_scalars_are_rounded_once_from_fp64():
    scalars = ADAMW.scalars()
    numbers = [name for name, kind in scalars._fields_ if kind is ctypes.c_float]
    fp32 = {name: torch.tensor(getattr(scalars, name)) for name in numbers}
    expected = {
        "keep": 1 - 3e-3 * 0.1,
        "decay": 0.0,
        "mean_rate": 1 - 0.9,
        "square_keep": 0.999,
        "square_rate": 1 - 0.999,
        "root_correction": (1 - 0.999**3) ** -0.5,
        "eps": 1e-8,
        "step_size": 3e-3 / (1 - 0.9**3),
    }
    assert {name: value.item() for name, value in fp32.items()} == {
        name: torch.tensor(value, dtype=torch.float64).float().item()
        for name, value in expected.items()
    }


def test_the_op_runs_the_reference_where_there_is_no_kernel():
    actual, expected = copied(edge_arrays(torch.float32)), copied(edge_arrays(torch.float32))
    adam(actual, torch.tensor([0.5]), ADAM)
    reference(expected, torch.tensor(0.5), ADAM.scalars())
    assert_same_bits(actual, expected)
    adam(Arrays([], [], [], [], []), torch.tensor(0.5), ADAM)


def test_the_op_passes_torchs_own_checks():
    arrays = arrays_of((5, 0, 3), torch.bfloat16, torch.float16, 2)
    settings = vars(ADAMW)
    for factor in (None, torch.tensor(0.5)):
        torch.library.opcheck(torch.ops.zeropp.adam.default, (*arrays, factor), settings)


def test_the_op_checks_fake_tensors():
    with FakeTensorMode():
        tensor = torch.empty(5)
        adam(Arrays([tensor], [tensor.bfloat16()], [tensor], [tensor], []), None, ADAMW)
        with pytest.raises(ValueError, match="its parameter"):
            adam(Arrays([tensor], [tensor], [tensor], [tensor[:4]], []), None, ADAMW)


def one_of(**changes: object) -> Arrays:
    fp32 = {name: [torch.zeros(2, 3)] for name in Arrays._fields}
    return Arrays(**fp32 | {"copies": []} | changes)


@pytest.mark.parametrize(
    ("arrays", "factor", "message"),
    [
        (one_of(means=[]), None, "0 means for 1 parameters"),
        (one_of(parameters=[torch.zeros(2, 3).half()]), None, "parameters are torch.float16"),
        (one_of(gradients=[torch.zeros(2, 3).double()]), None, "gradients are torch.float64"),
        (one_of(copies=[torch.zeros(2, 3)]), None, "copies are torch.float32"),
        (one_of(squares=[torch.zeros(6)]), None, r"one of squares has shape \(6,\)"),
        (one_of(gradients=[torch.zeros(3, 2).t()]), None, r"strides \(1, 2\)"),
        (one_of(means=[torch.zeros(2, 3, device="meta")]), None, "is on meta"),
        (one_of(), torch.zeros(2), "factor has 2 of torch.float32"),
        (one_of(), torch.zeros((), dtype=torch.float64), "factor has 1 of torch.float64"),
    ],
)
def test_unsupported_tensors_are_refused(arrays, factor, message):
    with pytest.raises((TypeError, ValueError), match=message):
        adam(arrays, factor, ADAMW)


def test_gradients_of_two_types_in_one_call_are_refused():
    two = [[torch.zeros(1), torch.zeros(1)] for _ in range(5)]
    two[1] = [torch.zeros(1), torch.zeros(1).half()]
    with pytest.raises(TypeError, match="gradients are torch.float16 and torch.float32"):
        adam(Arrays(*two[:4], []), None, ADAMW)


def test_there_is_no_kernel_for_the_meta_device():
    assert kernel_for(torch.device("meta")) is None
