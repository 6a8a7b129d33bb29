"""Adam on a GPU: on any stream and in a CUDA graph, in large memory, and the optimizer."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.gpu import MARKS
from tests.zeropp.optim.adam_checks import (
    ADAMW,
    Kernel,
    arrays_of,
    assert_same_bits,
    check_against_reference,
    copied,
    edge_arrays,
)
from zeropp import FusedAdam, InputError
from zeropp.optim.adam import fastest_adamw
from zeropp.optim.adam_op import Arrays, adam, kernel_for, reference, run_kernel
from zeropp.quant.packing import FLOATS

GPU = "cuda:0"
CYCLES = 200_000_000  # a tenth of a second: far longer than a launch
pytestmark = MARKS


@pytest.fixture(scope="module", autouse=True)
def kernel() -> Callable:
    kernel = kernel_for(torch.device(GPU))
    if kernel is None:
        pytest.skip("csrc/ is not built for this GPU: install again where nvcc is")
    return kernel


def test_the_op_uses_the_kernel():
    arrays = arrays_of((1024, 0, 77), torch.bfloat16, torch.float16, 2)
    mine, right = copied(arrays, GPU), copied(arrays)
    adam(mine, torch.tensor(0.5, device=GPU), ADAMW)
    reference(right, torch.tensor(0.5), ADAMW.scalars())
    assert_same_bits(mine, right)


def test_the_reference_gives_the_same_bits_on_the_gpu():
    for dtype in FLOATS:
        kernel = Kernel("reference", lambda a, factor, by: reference(a, factor, by.scalars()), GPU)
        check_against_reference(kernel, edge_arrays(dtype, torch.bfloat16), 0.37, ADAMW)


def test_it_runs_on_the_current_stream_and_waits_for_nothing():
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


def test_a_graph_holds_it_and_replays_it_on_new_gradients():
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


def test_the_same_bits_every_time(kernel):
    arrays = copied(arrays_of((1 << 20, 333), torch.bfloat16, None, 2), GPU)
    first = copied(arrays, GPU)
    run_kernel(kernel, first, None, ADAMW.scalars())
    for _ in range(5):
        again = copied(arrays, GPU)
        run_kernel(kernel, again, None, ADAMW.scalars())
        assert_same_bits(
            again, Arrays(*([tensor.cpu() for tensor in tensors] for tensors in first))
        )


def test_elements_beyond_2_to_the_31(kernel):
    size, tail = (1 << 31) + 5000, 5000
    if torch.cuda.mem_get_info(0)[0] < 36 << 30:
        pytest.skip("this takes 31 GB of the GPU's memory")
    big = [torch.zeros(size, device=GPU) for _ in range(3)]
    end = arrays_of((tail,), torch.bfloat16, None, 2)
    gradient = torch.zeros(size, dtype=torch.bfloat16, device=GPU)
    mine = Arrays([big[0]], [gradient], [big[1]], [big[2]], [])
    for (whole,), (part,) in zip(mine[:4], end[:4], strict=True):
        whole[-tail:] = part.to(GPU)
    run_kernel(kernel, mine, None, ADAMW.scalars())
    reference(end, None, ADAMW.scalars())
    assert_same_bits(Arrays(*([tensor[-tail:] for tensor in tensors] for tensors in mine)), end)


def test_steps_of_the_optimizer_are_those_on_the_cpu_and_never_wait():
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


def test_a_state_of_torchs_fused_adamw_on_the_gpu():
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


def test_a_step_in_a_capture_is_refused():
    parameter = nn.Parameter(torch.ones(300, device=GPU))
    parameter.grad = torch.ones_like(parameter)
    optimizer = FusedAdam([parameter])
    with pytest.raises(InputError, match="counts its steps on the host"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()


def test_fastest_adamw_is_ours_on_a_gpu():
    parameter = nn.Parameter(torch.ones(300, device=GPU))
    optimizer = fastest_adamw([parameter], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    assert isinstance(optimizer, FusedAdam)
