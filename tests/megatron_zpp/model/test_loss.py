"""The fused output layer and loss against torch's own, and the memory that they allocate."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_zpp.model import loss as module
from megatron_zpp.model.loss import (
    chunked_cross_entropy,
    head_loss,
    logits_to_gradient,
    whole_cross_entropy,
)

TOKENS, HIDDEN, VOCABULARY = 40, 8, 1000


def example(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(7)
    hidden = torch.randn(TOKENS, HIDDEN).mul_(scale).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    mask = (torch.rand(TOKENS) < 0.7).float()
    return hidden, weight, labels, mask


def reference(hidden, weight, labels, mask) -> torch.Tensor:
    logits = F.linear(hidden, weight).float()
    each = F.cross_entropy(logits, labels, reduction="none")
    return (each * mask).sum() / mask.sum()


class LargeTensors(TorchDispatchMode):
    """Records the dtypes of new tensors as large as the logits, and operators on such tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []
        self.operators: list[str] = []
        self.storages: set[int] = set()
        self.tensors: list[torch.Tensor] = []  # kept alive, so that no address is used twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in (*args, out) if isinstance(each, torch.Tensor)]
        if any(each.numel() >= TOKENS * VOCABULARY for each in tensors):
            self.operators.append(str(func))
        if isinstance(out, torch.Tensor) and out.numel() >= TOKENS * VOCABULARY:
            if out.untyped_storage().data_ptr() not in self.storages:
                self.storages.add(out.untyped_storage().data_ptr())
                self.dtypes.append(out.dtype)
                self.tensors.append(out)
        return out


@pytest.mark.parametrize("chunk", [1, 3 * VOCABULARY, 2**18], ids=["1 row", "3 rows", "all rows"])
@pytest.mark.parametrize("scale", [1.0, 100.0], ids=["flat", "peaked"])
def test_equals_cross_entropy(chunk: int, scale: float, monkeypatch) -> None:
    """Value and both gradients, for any chunk size; large logits do not overflow."""
    monkeypatch.setattr(module, "CPU_CHUNK", chunk)
    results = []
    for function in (head_loss, reference):
        hidden, weight, labels, mask = example(scale=scale)
        loss = function(hidden, weight, labels, mask)
        (3 * loss).backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """The loss is that of fp32 on the rounded logits; gradients agree to their own round-off."""
    results = []
    for function in (head_loss, reference):
        hidden, weight, labels, mask = example(dtype)
        loss = function(hidden, weight, labels, mask)
        (1024 * loss).backward()
        assert loss.dtype == torch.float32 and hidden.grad.dtype == weight.grad.dtype == dtype
        results.append((loss.detach(), hidden.grad, weight.grad))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-6, atol=0)
    eps = torch.finfo(dtype).eps
    for ours, theirs in zip(results[0][1:], results[1][1:], strict=True):
        assert (ours - theirs).float().norm() < 2 * eps * theirs.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_exist_once(dtype: torch.dtype, monkeypatch) -> None:
    """Forward and backward make one tensor of the size of the logits, in their own dtype."""
    monkeypatch.setattr(module, "CPU_CHUNK", 8 * VOCABULARY)
    hidden, weight, labels, mask = example(dtype)
    with LargeTensors() as large_tensors:
        head_loss(hidden, weight, labels, mask).backward()
    assert large_tensors.dtypes == [dtype]


def test_without_gradient() -> None:
    """Evaluation gives the same value bit for bit, and keeps nothing."""
    hidden, weight, labels, mask = example()
    trained = head_loss(hidden, weight, labels, mask)
    with torch.no_grad():
        measured = head_loss(hidden, weight, labels, mask)
    assert measured.item() == trained.item()
    assert measured.grad_fn is None


def test_frozen_weight() -> None:
    hidden, weight, labels, mask = example()
    head_loss(hidden, weight.requires_grad_(False), labels, mask).backward()
    assert weight.grad is None and hidden.grad.abs().sum() > 0


def test_all_zero_mask() -> None:
    """An all-zero mask is a loss of zero with zero gradients, not a division by zero."""
    hidden, weight, labels, _ = example()
    loss = head_loss(hidden, weight, labels, torch.zeros(TOKENS))
    loss.backward()
    assert loss.item() == 0 and hidden.grad.abs().sum() == 0 == weight.grad.abs().sum()


def test_nan_is_propagated() -> None:
    hidden, weight, labels, mask = example()
    with torch.no_grad():
        hidden[mask.argmax()] = torch.nan
    assert head_loss(hidden, weight, labels, mask).isnan()


def test_a_second_backward_adds_the_same_gradients() -> None:
    hidden, weight, labels, mask = example()
    loss = head_loss(hidden, weight, labels, mask)
    loss.backward(retain_graph=True)
    first = hidden.grad.clone(), weight.grad.clone()
    loss.backward()
    assert torch.equal(hidden.grad, 2 * first[0]) and torch.equal(weight.grad, 2 * first[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cap", [None, 30.0], ids=["", "capped"])
def test_backward_reads_the_logits_in_two_products_and_writes_nothing_as_large(
    dtype: torch.dtype, cap: float | None
) -> None:
    hidden, weight, labels, mask = example(dtype)
    loss = head_loss(hidden, weight, labels, mask, cap=cap)
    with LargeTensors() as large_tensors:
        (3 * loss).backward()
    assert large_tensors.operators == ["aten.mm.default", "aten.t.default", "aten.mm.default"]


@pytest.mark.parametrize("scale", [1.0, 5e4], ids=["scale 1", "scale 50000"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_a_large_vocabulary_and_of_many_tokens(
    dtype: torch.dtype, scale: float, monkeypatch
) -> None:
    """16 of 65,536 tokens, with 131,072 logits each, err as far as numbers of `dtype` are rounded.

    With the unit roundoff u and half a subnormal e: logits' gradients, products and their multiples
    each err by u of their value or e; in fp16 the hidden states of one product do. Sums of T or V
    terms are in fp32, and so is softmax: 0.1 u.
    """
    tokens, count, vocabulary = 16, 2.0**16, 2**17
    monkeypatch.setattr(module, "_count", lambda mask: torch.tensor(count))
    torch.manual_seed(3)
    hidden = torch.randn(tokens, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, HIDDEN).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,))
    (scale * head_loss(hidden, weight, labels, torch.ones(tokens))).backward()
    with torch.no_grad():
        logits = F.linear(hidden, weight).double()
        gradient = logits.softmax(1).scatter_add(
            1, labels[:, None], -torch.ones(tokens, 1).double()
        )
    u, e = (
        torch.finfo(dtype).eps / 2,
        torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2,
    )
    factor, h, w = scale / count, hidden.detach().double(), weight.detach().double()
    for ours, left, right in ((hidden.grad, gradient, w), (weight.grad, gradient.t(), h)):
        terms = factor * left.abs() @ right.abs()
        rounded = e * (factor * right.abs().sum(0) + left.abs().sum(1, keepdim=True) + 2)
        errors = (ours.double() - factor * left @ right).abs()
        assert (errors <= 3.1 * u * terms + rounded).all()
        if scale > 1:  # a scale that was rounded to `dtype` would be a gain
            expected = factor * left @ right
            gain = (ours.double() * expected).sum() / expected.square().sum()
            assert abs(gain - 1) < u / 10, gain


def test_under_autocast() -> None:
    hidden, weight, labels, mask = example()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head_loss(hidden, weight, labels, mask)
    loss.backward()
    assert loss.item() == pytest.approx(reference(*example()).item(), rel=1e-2)
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_cross_entropy_equals_the_chunked_one(dtype: torch.dtype, compiled: bool) -> None:
    """Equal losses; gradients differ by a rounding of the logits' dtype."""
    hidden, weight, labels, mask = (tensor.detach() for tensor in example(dtype, scale=3.0))
    expected, logits = hidden @ weight.t(), hidden @ weight.t()
    kernel = torch.compile(logits_to_gradient) if compiled else None
    losses = whole_cross_entropy(logits, labels, mask, kernel)
    expected_losses = chunked_cross_entropy(expected, labels, mask)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(logits, expected, rtol=max(step, 1e-5), atol=1e-7)


def test_the_compiled_loss_has_both_gradients_and_makes_no_wide_copy() -> None:
    hidden, weight, labels, mask = example(torch.bfloat16)
    head_loss(hidden, weight, labels, mask).backward()
    expected = hidden.grad, weight.grad
    torch._dynamo.reset()
    hidden, weight, labels, mask = example(torch.bfloat16)
    compiled = partial(whole_cross_entropy, kernel=torch.compile(logits_to_gradient))
    _, (code,) = run_and_get_code(
        lambda: head_loss(hidden, weight, labels, mask, compiled).backward()
    )
    shapes = re.findall(r"= empty_strided\w*\(\(([^)]*)\)", code)
    assert shapes and not any(str(VOCABULARY) in shape for shape in shapes), code
    for ours, theirs in zip((hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-4)
