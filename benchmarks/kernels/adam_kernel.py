"""Adam's kernel for quantize_kernels.py: one call that unscales, clips, updates and copies.

Its peer is what PyTorch offers: a multiplication of all gradients, then AdamW(fused=True).
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.quantize_works import SEED, Work, block_layout
from benchmarks.kernels.quantizers import Peer
from zeropp.optim.adam_op import AdamSettings, Arrays, adam, kernels_on, reference

SETTINGS = AdamSettings(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10)
FACTOR = 0.25  # what unscaling and clipping come to
STATE = 3  # parameters, first and second moments
ALIGN = 128  # elements; where PyTorch's allocator would let a tensor begin


def adam_works(elements: int, device: torch.device) -> Iterator[Work]:
    """AdamW on the tensors of a transformer block; nothing where there is no kernel of it."""
    if kernels_on(device) is None:
        return
    yield adam_work("AdamW, fp32 gradients", elements, device, torch.float32, None)
    half = torch.bfloat16
    yield adam_work("AdamW, bf16, and bf16 copies", elements, device, half, half)


def adam_work(
    name: str, elements: int, device: torch.device, dtype: torch.dtype, copies: torch.dtype | None
) -> Work:
    """Gradients of `dtype`; with `copies` the new weights are written in that dtype too."""
    generator = torch.Generator(device).manual_seed(SEED)
    state = torch.randn(STATE, elements, generator=generator, device=device)
    state[-1].square_()
    gradients = torch.randn(elements, generator=generator, device=device).to(dtype)
    start, factor = state.clone(), torch.tensor(FACTOR, device=device)
    twins = None if copies is None else torch.ones(elements, dtype=copies, device=device)
    arrays = arrays_of(state, gradients, twins)

    def plain(start: Tensor, gradients: Tensor) -> tuple[Tensor, ...]:
        found = start.clone()
        twins = None if copies is None else start.new_empty(elements, dtype=copies)
        number = torch.tensor(FACTOR, device=start.device)
        reference(arrays_of(found, gradients, twins), number, SETTINGS.scalars())
        return (found,) if twins is None else (found, twins)

    wrote = (state,) if twins is None else (state, twins)
    return Work(
        name=name, run=lambda: adam(arrays, factor, SETTINGS), wrote=wrote,
        inputs=(start, gradients), plain=plain,
        num_bytes=sum(one.nbytes for one in (state, gradients, *wrote)),
        peers=partial(torch_adamw, start, gradients),
    )  # fmt: skip


def torch_adamw(start: Tensor, gradients: Tensor) -> Iterator[Peer]:
    """PyTorch's own way, on fp32 gradients: it has no other for fp32 weights."""
    weights = cut(start[0].clone())
    for weight, gradient in zip(weights, cut(gradients.float()), strict=True):
        weight.grad = gradient.clone()
    by = SETTINGS
    optimizer = torch.optim.AdamW(
        weights, lr=by.lr, betas=(by.beta1, by.beta2), eps=by.eps, weight_decay=by.weight_decay,
        fused=True,
    )  # fmt: skip
    one = torch.ones((), device=start.device)  # what is multiplied again and again stays as it is

    def run() -> None:
        torch._foreach_mul_([weight.grad for weight in weights], one)
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
    sizes.append(sizes.pop(0))  # the one that may be ragged is the last
    return [part for part in flat.split(sizes) if part.numel()]
