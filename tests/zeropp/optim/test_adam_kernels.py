"""Adam's kernels against the plain-torch reference, bit by bit.

They are csrc/adam/math.h on one element after another, the kernel for CPUs by each instruction set,
and that for GPUs, on the CPU warp by warp and on a GPU.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.instruction_sets import use_isa
from tests.gpu import MARKS
from tests.zeropp.optim.adam_checks import (
    ADAM,
    ADAMW,
    COPIES,
    PLAIN,
    SIZES,
    Kernel,
    arrays_of,
    check_against_reference,
    copied,
    edge_arrays,
    with_bf16_moments,
)
from zeropp.native.kernels import ISAS
from zeropp.native.library import ADDRESS
from zeropp.optim.adam_op import AdamSettings, Arrays, adam, kernel_for, run_kernel
from zeropp.quant.packing import FLOATS

HERE = Path(__file__).parent
FLAGS = "-std=c++17 -O2 -Wall -Wextra -ffp-contract=off -fPIC -shared"
SETTINGS = (ADAMW, ADAM, PLAIN)
CHUNK, PIECE = 256, 1 << 16  # of csrc/adam/cpu.cpp
RAGGED = (1, 3, CHUNK - 1, CHUNK, CHUNK + 5, 0, 7 * CHUNK + 31, PIECE + CHUNK + 1)
WIDE = (1024, 4, 2048, 1024 + 256, 3 * 1024 + 4)
# Elements by which parameters, gradients, means, squares and copies are moved: each of them keeps
# the wide accesses away.
SHIFTS = ((1, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 0, 2, 0, 0), (0, 0, 0, 3, 0), (0, 0, 0, 0, 2))
ALL_SHIFTED = (1, 3, 2, 1, 3)
NOT_FINITE = (float("inf"), -float("inf"), float("nan"))
GPUS = ["emulated", pytest.param("cuda", marks=MARKS)]
ON_GPUS = pytest.mark.parametrize("kernel", GPUS, indirect=True)
ON_CPU = pytest.mark.parametrize("kernel", ISAS, indirect=True)


@pytest.fixture(params=["math.h", *ISAS, *GPUS])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    name = request.param
    if name in ("math.h", "emulated"):
        library = request.getfixturevalue("scalar_adam" if name == "math.h" else "emulated")
        more = () if name == "math.h" else (0, None)
        function = library.zpp_adam if name == "math.h" else library.library.zpp_adam
        yield Kernel(name, _runs(lambda call, device: function(call, *more)))
        return
    device = "cuda:0" if name == "cuda" else "cpu"
    function = kernel_for(torch.device(device))
    if function is None:
        pytest.skip("csrc/ is not built here: make setup builds it where there is a compiler")
    if name != "cuda" and not use_isa(name):
        pytest.skip(f"this processor has no {name}")
    yield Kernel(name, _runs(function), device)
    use_isa(None)


def _runs(function):
    def run(arrays: Arrays, factor: Tensor | None, settings: AdamSettings) -> None:
        run_kernel(function, arrays, factor, settings.scalars())

    return run


@pytest.fixture(scope="module")
def scalar_adam(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here to compile csrc/adam/math.h")
    path = tmp_path_factory.mktemp("scalar") / "adam.so"
    headers = ["-I", str(HERE.parents[2] / "csrc")]
    command = [compiler, *FLAGS.split(), *headers, str(HERE / "scalar_adam.cpp"), "-o", str(path)]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(path))
    library.zpp_adam.argtypes, library.zpp_adam.restype = (ADDRESS,), None
    return library


@pytest.fixture
def set_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_ragged_and_wide_tensors_that_begin_anywhere(kernel, dtype, copy):
    is_isa = kernel.name in ISAS
    for seed, settings in enumerate((*SETTINGS, replace(ADAMW, step=100_000))):
        factor = (None, 0.37, 1.0, None)[seed]
        shifts = ALL_SHIFTED if is_isa and seed % 3 else (0,) * 5
        for sizes in (RAGGED,) if is_isa else (SIZES, WIDE):
            arrays = arrays_of(sizes, dtype, copy, seed)
            check_against_reference(kernel, arrays, factor, settings, shifts)
            if is_isa:
                arrays = with_bf16_moments(arrays)
                check_against_reference(kernel, arrays, factor, settings, shifts)


@ON_GPUS
@pytest.mark.parametrize("shifts", [*SHIFTS, (1, 2, 3, 0, 1)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_tensors_that_wide_accesses_cannot_touch(kernel, dtype, shifts):
    arrays = arrays_of((1023, 2048, 4), dtype, torch.bfloat16, 3)
    check_against_reference(kernel, arrays, 0.5, ADAMW, shifts)


@ON_GPUS
@pytest.mark.parametrize("count", [75, 76, 77, 155])
def test_more_tensors_than_a_launch_takes(kernel, count):
    sizes = [(1, 1024, 0, 36, 1500)[index % 5] for index in range(count)]
    check_against_reference(kernel, arrays_of(sizes, torch.bfloat16, None, count), None, ADAMW)


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_all_combinations_of_extreme_values(kernel, dtype, copy):
    if kernel.name == "emulated" and (dtype, copy) != (torch.float32, torch.float16):
        return
    for settings in SETTINGS:
        for factor in (None, 1.0, 0.37, 2.0**-16, 1e-40, -0.0)[:: 1 if kernel.is_exact else 2]:
            check_against_reference(kernel, edge_arrays(dtype, copy), factor, settings)


def test_many_ordinary_numbers(kernel):
    """Square roots and quotients round alike."""
    count = {"cuda": 1 << 22, "emulated": 5000}.get(kernel.name, 100_001)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(count, generator=generator) for _ in range(4)]
    arrays = Arrays([parts[0]], [parts[1]], [parts[2] * 1e-2], [parts[3].square() * 1e-4], [])
    for settings in (ADAMW, ADAM):
        check_against_reference(kernel, arrays, 0.37, settings)


@pytest.mark.parametrize("factor", NOT_FINITE)
def test_a_factor_that_is_not_finite_leaves_every_bit(kernel, factor):
    edges = [edge_arrays(dtype, torch.bfloat16) for dtype in FLOATS]
    if kernel.name in ISAS:
        edges.append(with_bf16_moments(edge_arrays(torch.float32)))
    if kernel.name == "emulated":
        edges = [arrays_of((1024, 5), torch.float16, torch.bfloat16, 1)]
    for before in edges:
        for run in (kernel.run, adam) if kernel.is_exact else (kernel.run,):
            after = copied(before, kernel.device)
            run(after, torch.tensor(factor, device=kernel.device), ADAMW)
            for old, now in zip(sum(before, []), sum(after, []), strict=True):
                assert torch.equal(old.view(torch.uint8), now.cpu().view(torch.uint8))


@ON_CPU
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_work_and_change_nothing(kernel, threads, set_threads):
    """One tensor of many pieces among small ones: 4 to 7 MB, enough for three threads."""
    sizes = (5, 3 * PIECE + 3, *[9] * 40, PIECE)
    for arrays in (arrays_of(sizes, torch.float32, torch.bfloat16, 8),
                   with_bf16_moments(arrays_of(sizes, torch.bfloat16, None, 6))):  # fmt: skip
        torch.set_num_threads(threads)
        check_against_reference(kernel, arrays, 0.5, ADAMW)


def test_no_memory_outside_the_tensors_is_written(kernel):
    """Tensors one after another in one piece of memory, a number between them."""
    memory = [torch.full((4100,), 7.0, device=kernel.device) for _ in range(4)]
    places = (slice(0, 1023), slice(1024, 2048), slice(2049, 4099))
    arrays = Arrays(*([tensor[place] for place in places] for tensor in memory), [])
    kernel.run(arrays, None, ADAMW)
    for tensor in (memory[0], memory[2], memory[3]):
        assert (tensor[[1023, 2048, 4099]] == 7).all()
