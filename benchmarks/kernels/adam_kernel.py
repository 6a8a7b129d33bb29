"""Adam's kernel, which benchmarks/kernels/quantize_kernels.py times as well, and its peers.

One call unscales, clips, updates and copies. PyTorch takes several: a multiplication of all
gradients by one factor, or by two where the loss scale and the clipping factor stay apart,
AdamW(fused=True), and a copy to bf16. DeepSpeed's, where it is installed, is a step and that copy.
"""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.kernels.timed_cases import SEED, Case, block_layout
from zeropp.optim.adam_op import AdamSettings, Arrays, adam, kernel_for, reference

SETTINGS = AdamSettings(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10, seed=1)
PEER_OPTIONS = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
FACTOR = 0.25  # of unscaling and clipping
ALIGN = 128  # elements; tensors start at multiples of it, as in PyTorch's allocator
FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another library's op beside Adam's kernel; `differs` says how it computes something else."""

    name: str
    run: Callable[[], object]
    differs: str


def adam_cases(elements: int, device: torch.device) -> Iterator[Case]:
    """AdamW on the tensors of a transformer block; nothing if there is no kernel for it."""
    if kernel_for(device) is None:
        return
    yield adam_case("AdamW, fp32 gradients", elements, device, FP32, None)
    yield adam_case("AdamW, bf16, and bf16 copies", elements, device, BF16, BF16)
    if device.type == "cpu":
        name = "AdamW, bf16 with moments, and bf16 copies"
        yield adam_case(name, elements, device, BF16, BF16, moments=BF16)


def adam_case(
    name: str, elements: int, device: torch.device, dtype: torch.dtype,
    copies: torch.dtype | None, moments: torch.dtype = FP32,
) -> Case:  # fmt: skip
    """AdamW with gradients of `dtype`; with `copies` it also writes the weights in that dtype."""
    generator = torch.Generator(device).manual_seed(SEED)
    drawn = torch.randn(4, elements, generator=generator, device=device)
    drawn[2].square_()
    dtypes = FP32, moments, moments, dtype
    start = tuple(part.to(kind) for part, kind in zip(drawn, dtypes, strict=True))
    *state, gradients = (part.clone() for part in start)
    written = () if copies is None else (torch.ones(elements, dtype=copies, device=device),)
    arrays, factor = arrays_of(*state, gradients, *written), torch.tensor(FACTOR, device=device)

    def expected(*start: Tensor) -> tuple[Tensor, ...]:
        *result, gradients = (part.clone() for part in start)
        copy = [start[0].new_empty(elements, dtype=copies)] if written else []
        factor = torch.tensor(FACTOR, device=start[0].device)
        reference(arrays_of(*result, gradients, *copy), factor, SETTINGS.scalars())
        return (*result, *copy)

    outputs = (*state, *written)
    return Case(
        name=name, op="adam", run=lambda: adam(arrays, factor, SETTINGS), inputs=start,
        outputs=outputs, expected=expected,
        num_bytes=sum(tensor.nbytes for tensor in (*state, gradients, *outputs)),
    )  # fmt: skip


def adam_peers(
    weights: Tensor, means: Tensor, squares: Tensor, gradients: Tensor
) -> Iterator[Peer]:
    """What PyTorch and DeepSpeed offer, on fp32 gradients: they take no others for fp32 weights."""
    owned = cut(weights.clone())
    for weight, gradient in zip(owned, cut(gradients.float()), strict=True):
        weight.grad = gradient.clone()
    factor = torch.ones((), device=weights.device)  # 1, as it multiplies again and again
    copies = [weight.bfloat16() for weight in owned]
    step = torch.optim.AdamW(owned, **PEER_OPTIONS, fused=True).step

    def sequence(step: Callable[[], object], factors: int, copied: list[Tensor]) -> None:
        for _ in range(factors):
            torch._foreach_mul_([weight.grad for weight in owned], factor)
        step()
        if copied:
            torch._foreach_copy_(copied, owned)

    differs = "gradients in fp32, read and written once more"
    name = "torch._foreach_mul_, then torch.optim.AdamW(fused=True)"
    yield Peer(name=name, run=partial(sequence, step, 1, []), differs=f"{differs}; no copies")
    yield Peer(
        name="torch._foreach_mul_ twice, torch.optim.AdamW(fused=True), torch._foreach_copy_",
        run=partial(sequence, step, 2, copies), differs=differs.replace("once", "twice"),
    )  # fmt: skip
    yield Peer(name="torch.optim.AdamW(fused=True)", run=step, differs="no factor and no copies")
    if weights.device.type == "cpu" and find_spec("deepspeed"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(torch.get_num_threads())  # not torch's
        step = DeepSpeedCPUAdam(owned, **PEER_OPTIONS).step
        yield Peer(
            name="DeepSpeedCPUAdam, torch._foreach_copy_", run=partial(sequence, step, 0, copies),
            differs="gradients in fp32; no factor",
        )  # fmt: skip


def arrays_of(
    weights: Tensor, means: Tensor, squares: Tensor, gradients: Tensor, copies: Tensor | None = None
) -> Arrays:
    """The tensors of a block out of flat arrays (n,)."""
    return Arrays(
        parameters=cut(weights), gradients=cut(gradients), means=cut(means), squares=cut(squares),
        copies=[] if copies is None else cut(copies),
    )  # fmt: skip


def cut(flat: Tensor) -> list[Tensor]:
    """A block's parameters as views of `flat` (n,)."""
    first, *others = block_layout(len(flat)).sizes
    sizes = [first, *(size // ALIGN * ALIGN for size in others)]
    sizes[0] = len(flat) - sum(sizes[1:])
    sizes.append(sizes.pop(0))  # the last one may be no multiple of ALIGN
    return [part for part in flat.split(sizes) if part.numel()]
