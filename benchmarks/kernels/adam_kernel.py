"""Adam's kernel, which benchmarks/kernels/quantize_kernels.py times as well.

One call unscales, clips, updates and copies. Its peer is what PyTorch offers: a multiplication of
all gradients, then AdamW(fused=True).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.kernels.other_libraries import Peer
from benchmarks.kernels.timed_cases import SEED, Case, block_layout
from zeropp.optim.adam_op import AdamSettings, Arrays, adam, kernel_for, reference

SETTINGS = AdamSettings(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10)
FACTOR = 0.25  # of unscaling and clipping
STATE = 3  # parameters, first and second moments
ALIGN = 128  # elements; tensors start at multiples of it, as in PyTorch's allocator


def adam_cases(elements: int, device: torch.device) -> Iterator[Case]:
    """AdamW on the tensors of a transformer block; nothing if there is no kernel for it."""
    if kernel_for(device) is None:
        return
    yield adam_case("AdamW, fp32 gradients", elements, device, torch.float32, None)
    half = torch.bfloat16
    yield adam_case("AdamW, bf16, and bf16 copies", elements, device, half, half)


def adam_case(
    name: str, elements: int, device: torch.device, dtype: torch.dtype, copies: torch.dtype | None
) -> Case:
    """AdamW with gradients of `dtype`; with `copies` it also writes the weights in that dtype."""
    generator = torch.Generator(device).manual_seed(SEED)
    state = torch.randn(STATE, elements, generator=generator, device=device)
    state[-1].square_()
    gradients = torch.randn(elements, generator=generator, device=device).to(dtype)
    start, factor = state.clone(), torch.tensor(FACTOR, device=device)
    written = None if copies is None else torch.ones(elements, dtype=copies, device=device)
    arrays = arrays_of(state, gradients, written)

    def expected(start: Tensor, gradients: Tensor) -> tuple[Tensor, ...]:
        result = start.clone()
        copy = None if copies is None else start.new_empty(elements, dtype=copies)
        factor = torch.tensor(FACTOR, device=start.device)
        reference(arrays_of(result, gradients, copy), factor, SETTINGS.scalars())
        return (result,) if copy is None else (result, copy)

    outputs = (state,) if written is None else (state, written)
    return Case(
        name=name, op="adam", run=lambda: adam(arrays, factor, SETTINGS),
        inputs=(start, gradients), outputs=outputs, expected=expected,
        num_bytes=sum(tensor.nbytes for tensor in (state, gradients, *outputs)),
    )  # fmt: skip


def torch_adamw(start: Tensor, gradients: Tensor) -> Iterator[Peer]:
    """PyTorch's AdamW on fp32 gradients: it takes no others for fp32 weights."""
    weights = cut(start[0].clone())
    for weight, gradient in zip(weights, cut(gradients.float()), strict=True):
        weight.grad = gradient.clone()
    optimizer = torch.optim.AdamW(
        weights, lr=SETTINGS.lr, betas=(SETTINGS.beta1, SETTINGS.beta2), eps=SETTINGS.eps,
        weight_decay=SETTINGS.weight_decay, fused=True,
    )  # fmt: skip
    factor = torch.ones((), device=start.device)  # 1, as gradients are multiplied again and again

    def run() -> None:
        torch._foreach_mul_([weight.grad for weight in weights], factor)
        optimizer.step()

    yield Peer(
        name="torch._foreach_mul_, then torch.optim.AdamW(fused=True)", run=run,
        differs="gradients in fp32, read and written once more; no copies",
    )  # fmt: skip


def arrays_of(state: Tensor, gradients: Tensor, copies: Tensor | None) -> Arrays:
    """The tensors of a block out of state (3, n), gradients (n,) and copies (n,)."""
    parameters, means, squares = (cut(part) for part in state)
    return Arrays(
        parameters=parameters, gradients=cut(gradients), means=means, squares=squares,
        copies=[] if copies is None else cut(copies),
    )  # fmt: skip


def cut(flat: Tensor) -> list[Tensor]:
    """A block's parameters as views of `flat` (n,)."""
    first, *others = block_layout(len(flat)).sizes
    sizes = [first, *(size // ALIGN * ALIGN for size in others)]
    sizes[0] = len(flat) - sum(sizes[1:])
    sizes.append(sizes.pop(0))  # the last one may be no multiple of ALIGN
    return [part for part in flat.split(sizes) if part.numel()]
