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
    """Records the dtype of each new tensor that is at least as large as the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []
        self.storages: set[int] = set()
        self.tensors: list[torch.Tensor] = []  # kept alive, so that no address is used twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
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


def test_second_backward_is_refused() -> None:
    """The logits were overwritten with their gradient, so a second pass would be wrong."""
    loss = head_loss(*example())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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
