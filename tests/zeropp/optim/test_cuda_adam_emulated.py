"""Adam's CUDA kernel on the CPU, warp by warp, against the reference."""

import pytest
import torch
from torch import Tensor

from tests.zeropp.optim.adam_checks import (
    ADAM,
    ADAMW,
    COPIES,
    PLAIN,
    SIZES,
    Run,
    arrays_of,
    check_against_reference,
    copied,
    edge_arrays,
)
from tests.zeropp.quant.emulated_kernels import EmulatedLibrary
from zeropp.optim.adam_op import AdamSettings, Arrays, run_kernel
from zeropp.quant.packing import FLOATS

WIDE = (1024, 4, 2048, 1024 + 256, 3 * 1024 + 4)
# Elements by which parameters, gradients, means, squares and copies are moved: each of them keeps
# the wide accesses away.
SHIFTS = ((1, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 0, 2, 0, 0), (0, 0, 0, 3, 0), (0, 0, 0, 0, 2))


@pytest.fixture
def run(emulated: EmulatedLibrary) -> Run:
    def launch(arrays: Arrays, factor: Tensor | None, settings: AdamSettings) -> None:
        library = emulated.library
        run_kernel(
            lambda call, device: library.zpp_adam(call, 0, None), arrays, factor, settings.scalars()
        )

    return launch


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_ragged_and_wide_tensors(run, dtype, copy):
    for seed, settings in enumerate((ADAMW, ADAM)):
        for sizes in (SIZES, WIDE):
            arrays = arrays_of(sizes, dtype, copy, seed)
            check_against_reference(run, arrays, (None, 0.37)[seed], settings)


@pytest.mark.parametrize("shifts", [*SHIFTS, (1, 2, 3, 0, 1)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_tensors_that_begin_anywhere(run, dtype, shifts):
    arrays = arrays_of((1023, 2048, 4), dtype, torch.bfloat16, 3)
    check_against_reference(run, arrays, 0.5, ADAMW, shifts=shifts)


@pytest.mark.parametrize("count", [75, 76, 77, 155])
def test_more_tensors_than_a_launch_takes(run, count):
    sizes = [(1, 1024, 0, 36, 1500)[index % 5] for index in range(count)]
    check_against_reference(run, arrays_of(sizes, torch.bfloat16, None, count), None, ADAMW)


def test_all_combinations_of_extreme_values(run):
    for settings in (ADAMW, ADAM, PLAIN):
        check_against_reference(run, edge_arrays(torch.float32, torch.float16), 0.37, settings)


@pytest.mark.parametrize("factor", [float("inf"), -float("inf"), float("nan")])
def test_a_factor_that_is_not_finite_leaves_every_bit(run, factor):
    before = arrays_of((1024, 5), torch.float16, torch.bfloat16, 1)
    after = copied(before)
    run(after, torch.tensor(factor), ADAMW)
    for old, now in zip(sum(before, []), sum(after, []), strict=True):
        assert torch.equal(old.view(torch.uint8), now.view(torch.uint8))


def test_no_memory_outside_the_tensors_is_written(run):
    """Tensors one after another in one piece of memory, a number between them."""
    memory = [torch.full((4100,), 7.0) for _ in range(4)]
    places = (slice(0, 1023), slice(1024, 2048), slice(2049, 4099))
    arrays = Arrays(*([tensor[place] for place in places] for tensor in memory), [])
    check_against_reference(run, arrays, None, ADAMW)
    run(arrays, None, ADAMW)
    for tensor in (memory[0], memory[2], memory[3]):
        assert (tensor[[1023, 2048, 4099]] == 7).all()
