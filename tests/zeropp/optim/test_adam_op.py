"""Adam's arithmetic: the C++ op equals plain PyTorch bit by bit; unsupported arguments."""

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.zeropp.optim.adam_checks import (
    ADAM,
    ADAMW,
    COPIES,
    PLAIN,
    SIZES,
    Run,
    arrays_of,
    assert_same_bits,
    check_against_reference,
    copied,
    edge_arrays,
)
from zeropp.native.library import ADDRESS
from zeropp.optim.adam_op import AdamSettings, Arrays, adam, kernel_for, reference, run_kernel
from zeropp.quant.packing import FLOATS

HERE = Path(__file__).parent
FLAGS = "-std=c++17 -O2 -Wall -Wextra -ffp-contract=off -fPIC -shared"
FACTORS = (None, 1.0, 0.37, 2.0**-16, 1e-40, -0.0)


@pytest.fixture(scope="module")
def scalar_adam(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """csrc/adam/math.h on one element after another."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here to compile csrc/adam/math.h")
    path = tmp_path_factory.mktemp("scalar") / "adam.so"
    headers = ["-I", str(HERE.parents[2] / "csrc")]
    command = [compiler, *FLAGS.split(), *headers, str(HERE / "scalar_adam.cpp"), "-o", str(path)]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(path))
    library.zpp_adam.argtypes, library.zpp_adam.restype = (ADDRESS,), None

    def run(arrays: Arrays, factor: Tensor | None, settings: AdamSettings) -> None:
        run_kernel(lambda call, device: library.zpp_adam(call), arrays, factor, settings.scalars())

    return run


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_all_combinations_of_extreme_values(scalar_adam, dtype, copy):
    for settings in (ADAMW, ADAM, PLAIN):
        for factor in FACTORS:
            check_against_reference(scalar_adam, edge_arrays(dtype, copy), factor, settings)


@pytest.mark.parametrize("settings", [ADAMW, ADAM, PLAIN, replace(ADAMW, step=100_000)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_of_all_magnitudes(scalar_adam, dtype, settings):
    for seed, factor in enumerate((None, 0.37)):
        arrays = arrays_of(SIZES, dtype, torch.bfloat16, seed)
        check_against_reference(scalar_adam, arrays, factor, settings)


def test_a_hundred_thousand_ordinary_numbers(scalar_adam):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(100_001, generator=generator) for _ in range(4)]
    arrays = Arrays([parts[0]], [parts[1]], [parts[2] * 1e-2], [parts[3].square() * 1e-4], [])
    for settings in (ADAMW, ADAM):
        check_against_reference(scalar_adam, arrays, 0.37, settings)


@pytest.mark.parametrize("factor", [float("inf"), -float("inf"), float("nan")])
def test_a_factor_that_is_not_finite_leaves_every_bit(scalar_adam, factor):
    for run in (scalar_adam, adam):
        for dtype in FLOATS:
            before = edge_arrays(dtype, torch.float16)
            after = copied(before)
            run_with(run, after, factor)
            for name, tensors in before._asdict().items():
                for old, now in zip(tensors, getattr(after, name), strict=True):
                    assert torch.equal(old.view(torch.uint8), now.view(torch.uint8)), name


def run_with(run, arrays: Arrays, factor: float) -> None:
    run(arrays, torch.tensor(factor), ADAMW)


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
