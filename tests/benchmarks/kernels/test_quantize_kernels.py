"""The benchmark of the kernels at tiny sizes: what is verified, timed, counted and printed."""

from dataclasses import replace

import pytest
import torch

from benchmarks.kernels.adam_kernel import adam_case
from benchmarks.kernels.quantize_kernels import is_right, working_peers
from benchmarks.kernels.timed_cases import ROWS, block_layout, cases, requantize_cases
from zeropp.quant import reference
from zeropp.quant.cpu import backend

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(backend() is reference, reason="csrc/ was not built here")


def test_bytes_are_those_of_what_is_read_and_written() -> None:
    by_name = {case.name: case.num_bytes for case in cases(backend(), 1 << 14, CPU)}
    codes8, codes4 = (1 << 14) + ROWS * 16, (1 << 13) + ROWS * 32  # with a bf16 scale per block
    assert by_name["bf16 -> INT8"] == by_name["INT8 -> bf16"] == (2 << 14) + codes8
    assert by_name["fp32 -> INT4, reordered"] == (4 << 14) + codes4
    assert by_name["4 x INT8 -> sum -> INT4"] == codes8 + codes4 // 4
    assert by_name["8 x INT4 -> sum -> fp32"] == codes4 + (4 << 14) // 8
    steps = {case.name: case.num_bytes for case in requantize_cases(backend(), 1 << 14, CPU)}
    assert steps["bf16 -> INT8 by scales that stay"] == (2 << 14) + codes8 + ROWS * 16


def test_a_kernel_that_writes_something_else_is_seen() -> None:
    all_cases = [*cases(backend(), 1 << 13, CPU), *requantize_cases(backend(), 1 << 13, CPU)]
    for case in all_cases:
        assert is_right(case, CPU), case.name
        last = case.outputs[0].view(torch.uint8).view(-1)[-1:]

        def spoilt(case=case, last=last) -> None:
            case.run()
            last.add_(1)

        assert not is_right(replace(case, run=spoilt), CPU), case.name


@pytest.mark.parametrize("columns", [8192, 1 << 20, 100_003])
def test_a_blocks_segments_fill_a_row(columns: int) -> None:
    layout = block_layout(columns)
    assert layout.elements == columns and len(layout.sizes) == 12
    assert set(layout.bits[:4]) == {8} and set(layout.bits[4:]) == {16}


@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_adam_is_compared_with_its_reference_and_with_torchs(half: torch.dtype | None) -> None:
    elements, dtype = 40_001, half or torch.float32
    case = adam_case("AdamW", elements, CPU, dtype, half)
    before = case.outputs[0].clone()
    assert is_right(case, CPU)
    assert (case.outputs[0] != before).float().mean() > 0.99
    case.outputs[-1].view(-1)[-1] += 1
    assert not is_right(case, CPU)
    assert case.num_bytes == 28 * elements  # 24 of state; gradients 4, or 2 and the copies 2
    peers, errors = working_peers(case)
    assert [peer.name for peer in peers][:3] == [
        "torch._foreach_mul_, then torch.optim.AdamW(fused=True)",
        "torch._foreach_mul_ twice, torch.optim.AdamW(fused=True), torch._foreach_copy_",
        "torch.optim.AdamW(fused=True)",
    ]
    assert errors == []
