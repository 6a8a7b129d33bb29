"""Adam's CUDA kernel on a GPU: the bits of the reference, on any stream and in a CUDA graph."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.gpu import MARKS
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
from tests.zeropp.optim.test_cuda_adam_emulated import SHIFTS, WIDE
from zeropp import FusedAdam, InputError
from zeropp.optim.adam import fastest_adamw
from zeropp.optim.adam_op import AdamSettings, Arrays, adam, kernel_for, reference, run_kernel
from zeropp.quant.packing import FLOATS

GPU = "cuda:0"
CYCLES = 200_000_000  # a tenth of a second: far longer than a launch
NOT_FINITE = (float("inf"), -float("inf"), float("nan"))
pytestmark = MARKS


@pytest.fixture(scope="module")
def run() -> Run:
    kernel = kernel_for(torch.device(GPU))
    if kernel is None:
        pytest.skip("csrc/ is not built for this GPU: install again where nvcc is")

    def launch(arrays: Arrays, factor: Tensor | None, settings: AdamSettings) -> None:
        run_kernel(kernel, arrays, factor, settings.scalars())

    return launch


@pytest.mark.parametrize("shifts", [(0,) * 5, *SHIFTS, (1, 2, 3, 0, 1)])
@pytest.mark.parametrize("copy_type", COPIES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_ragged_and_wide_tensors(run, dtype, copy_type, shifts):
    for seed, settings in enumerate((ADAMW, ADAM)):
        for sizes in (SIZES, WIDE):
            arrays = arrays_of(sizes, dtype, copy_type, seed)
            check_against_reference(run, arrays, (None, 0.37)[seed], settings, GPU, shifts)


@pytest.mark.parametrize("copy_type", COPIES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_all_combinations_of_extreme_values(run, dtype, copy_type):
    for settings in (ADAMW, ADAM, PLAIN):
        for factor in (None, 0.37, 1e-40):
            check_against_reference(run, edge_arrays(dtype, copy_type), factor, settings, GPU)


@pytest.mark.parametrize("count", [75, 76, 77, 300])
def test_more_tensors_than_a_launch_takes(run, count):
    sizes = [(1, 1024, 0, 36, 1500)[index % 5] for index in range(count)]
    check_against_reference(run, arrays_of(sizes, torch.bfloat16, None, count), None, ADAMW, GPU)


def test_square_roots_and_quotients_round_like_the_cpus(run):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(1 << 22, generator=generator) for _ in range(4)]
    arrays = Arrays([parts[0]], [parts[1]], [parts[2] * 1e-2], [parts[3].square() * 1e-4], [])
    for settings in (ADAMW, ADAM):
        check_against_reference(run, arrays, 0.37, settings, GPU)


@pytest.mark.parametrize("factor", NOT_FINITE)
def test_a_factor_that_is_not_finite_leaves_every_bit(run, factor):
    before = edge_arrays(torch.float16, torch.bfloat16)
    after = copied(before, GPU)
    run(after, torch.tensor(factor, device=GPU), ADAMW)
    for old, now in zip(sum(before, []), sum(after, []), strict=True):
        assert torch.equal(old.view(torch.uint8), now.cpu().view(torch.uint8))


def test_the_op_uses_the_kernel(run):
    arrays = arrays_of((1024, 0, 77), torch.bfloat16, torch.float16, 2)
    mine, right = copied(arrays, GPU), copied(arrays)
    adam(mine, torch.tensor(0.5, device=GPU), ADAMW)
    reference(right, torch.tensor(0.5), ADAMW.scalars())
    assert_same_bits(mine, right)


def test_the_reference_gives_the_same_bits_on_the_gpu(run):
    for dtype in FLOATS:
        check_against_reference(
            lambda arrays, factor, by: reference(arrays, factor, by.scalars()),
            edge_arrays(dtype, torch.bfloat16), 0.37, ADAMW, GPU,
        )  # fmt: skip


def test_it_runs_on_the_current_stream_and_waits_for_nothing(run):
    """The gradients and the factor are written behind a long wait."""
    arrays = arrays_of((1 << 16, 77), torch.float32, torch.bfloat16, 2)
    late = [gradient.pin_memory() for gradient in (*arrays.gradients, torch.tensor(0.5))]
    mine, factor = copied(arrays, GPU), torch.zeros((), device=GPU)
    for gradient in mine.gradients:
        gradient.zero_()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        for target, source in zip((*mine.gradients, factor), late, strict=True):
            target.copy_(source, non_blocking=True)
        adam(mine, factor, ADAMW)
        finished = side.record_event()
    assert not finished.query()
    side.synchronize()
    reference(arrays, torch.tensor(0.5), ADAMW.scalars())
    assert_same_bits(mine, arrays)


def test_a_graph_holds_it_and_replays_it_on_new_gradients(run):
    arrays = arrays_of((4096, 77, 300), torch.bfloat16, torch.bfloat16, 2)
    mine, factor = copied(arrays, GPU), torch.ones((), device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        adam(mine, factor, ADAMW)
    for value in (0.5, float("nan"), 2.0):
        for to, fresh in zip(mine.gradients, arrays.gradients, strict=True):
            fresh.neg_()
            to.copy_(fresh)
        factor.fill_(value)
        graph.replay()
        reference(arrays, torch.tensor(value), ADAMW.scalars())
        assert_same_bits(mine, arrays)


def test_the_same_bits_every_time(run):
    arrays = copied(arrays_of((1 << 20, 333), torch.bfloat16, None, 2), GPU)
    first = copied(arrays, GPU)
    run(first, None, ADAMW)
    for _ in range(5):
        again = copied(arrays, GPU)
        run(again, None, ADAMW)
        assert_same_bits(
            again, Arrays(*([tensor.cpu() for tensor in tensors] for tensors in first))
        )


def test_elements_beyond_2_to_the_31(run):
    size, tail = (1 << 31) + 5000, 5000
    if torch.cuda.mem_get_info(0)[0] < 36 << 30:
        pytest.skip("this takes 31 GB of the GPU's memory")
    big = [torch.zeros(size, device=GPU) for _ in range(3)]
    end = arrays_of((tail,), torch.bfloat16, None, 2)
    gradient = torch.zeros(size, dtype=torch.bfloat16, device=GPU)
    mine = Arrays([big[0]], [gradient], [big[1]], [big[2]], [])
    for (whole,), (part,) in zip(mine[:4], end[:4], strict=True):
        whole[-tail:] = part.to(GPU)
    run(mine, None, ADAMW)
    reference(end, None, ADAMW.scalars())
    assert_same_bits(Arrays(*([tensor[-tail:] for tensor in tensors] for tensors in mine)), end)


def test_steps_of_the_optimizer_are_those_on_the_cpu_and_never_wait(run):
    models = [nn.Sequential(nn.Linear(33, 64), nn.Linear(64, 5)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1].to(GPU)
    optimizers = [FusedAdam(model.parameters(), lr=1e-2) for model in models]
    for _ in range(3):
        for parameter, gpu_parameter in zip(*(model.parameters() for model in models), strict=True):
            parameter.grad = torch.randn_like(parameter)
            gpu_parameter.grad = parameter.grad.to(GPU)
        factors = torch.tensor(0.5), torch.tensor(0.5, device=GPU)
        optimizers[0].step(factor=factors[0])
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizers[1].step(factor=factors[1])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for parameter, gpu_parameter in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(parameter, gpu_parameter.cpu())
        assert optimizers[1].state[gpu_parameter]["step"].device.type == "cpu"


def test_a_state_of_torchs_fused_adamw_on_the_gpu(run):
    """It counts on the device; ours on the host, and it goes back."""
    parameter = nn.Parameter(torch.ones(300, device=GPU))
    theirs = torch.optim.AdamW([parameter], lr=1e-2, fused=True)
    parameter.grad = torch.ones_like(parameter)
    theirs.step()
    ours = FusedAdam([parameter], lr=1e-2)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    ours.step()
    assert ours.state[parameter]["step"].device.type == "cpu"
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    theirs.step()
    assert theirs.state[parameter]["step"].item() == 3
    assert theirs.state[parameter]["step"].device.type == "cuda"


def test_a_step_in_a_capture_is_refused(run):
    parameter = nn.Parameter(torch.ones(300, device=GPU))
    parameter.grad = torch.ones_like(parameter)
    optimizer = FusedAdam([parameter])
    with pytest.raises(InputError, match="counts its steps on the host"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()


def test_fastest_adamw_is_ours_on_a_gpu(run):
    parameter = nn.Parameter(torch.ones(300, device=GPU))
    optimizer = fastest_adamw([parameter], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    assert isinstance(optimizer, FusedAdam)
