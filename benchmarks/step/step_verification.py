"""Checks that training loops train alike before they are timed."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.training_setup import TrainingSetup
from benchmarks.step.training_loops import TrainingLoop, local_weights

# Adam with its own eps makes a full step of a gradient that is nothing but rounding (the gradient
# of the keys' bias has no other part). With this eps, far above the clipped gradients, updates are
# smooth in them: an error of 1% in the gradients is at most an error of 1% in the updates.
SMOOTH_EPS, EPS = 1e-2, 1e-8

VERIFIED_STEPS = 3
LossesAndNorms = Sequence[tuple[float, float]]  # of the first steps


def verify(loops: Sequence[TrainingLoop], setup: TrainingSetup) -> dict:
    """Train each for a few steps; raise Disagreement unless all agree with the first.

    Returns the largest relative differences: of losses, of gradient norms, and of the updates of
    all weights (L2 norm of the difference over that of the first's update).
    """
    reference, *others = loops
    before = _copied_weights(reference)
    history = first_steps(reference, setup, VERIFIED_STEPS)
    expected = _update(reference, before)
    allowed = tolerances(setup.dtype, setup.ranks.num_ranks)
    largest = dict.fromkeys(allowed, 0.0)
    for loop in others:
        differences = largest_differences(first_steps(loop, setup, VERIFIED_STEPS), history)
        differences["update"] = _distance(_update(loop, before), expected, setup)
        require_agreement(loop.name, reference.name, differences, allowed)
        largest = {name: max(largest[name], differences[name]) for name in largest}
    return {"steps": VERIFIED_STEPS, "differences": largest, "allowed": allowed}


def tolerances(dtype: str, num_ranks: int) -> dict[str, float]:
    """How far losses, gradient norms and updates of two correct loops may differ, relatively.

    fp32: a gradient sums some 2^11 terms in another order, 2^5.5 roundings of 2^-24 = 3e-6, and the
    update of a weight is rounded to the weight's own spacing, as much again; ten times that for
    three steps. Losses: the promise of 1e-5.
    16 bit: W gradients, each rounded by 2^-9 on the way and W - 1 times more where the sum itself
    is in 16 bit, are up to sqrt(W) times as large as their mean if they have nothing in common:
    (W + 1) sqrt(W) 2^-9 for both loops together. A loss is off by one rounding of its logits.
    """
    loss, others = 1e-5, 1e-4
    if dtype != "fp32":
        loss, others = 2.0**-9, (num_ranks + 1) * num_ranks**0.5 * 2.0**-9
    return {"loss": loss, "gradient norm": others, "update": others}


def first_steps(loop: TrainingLoop, setup: TrainingSetup, count: int) -> LossesAndNorms:
    """(mean loss over all ranks, gradient norm) of the first steps, with Adam made smooth."""
    _set_eps(loop.optimizer, SMOOTH_EPS)
    history = []
    for _ in range(count):
        loss, norm = loop.step()()
        if not loop.global_loss:
            loss = setup.ranks.sum(loss)[0] / setup.ranks.num_ranks
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        history.append((loss, float(norm)))
    _set_eps(loop.optimizer, EPS)
    return history


def largest_differences(history: LossesAndNorms, reference: LossesAndNorms) -> dict[str, float]:
    """The largest relative differences of losses and of gradient norms; NaN where one is NaN."""
    ratios = torch.tensor(history, dtype=torch.float64) / torch.tensor(
        reference, dtype=torch.float64
    )
    loss, norm = (ratios - 1).abs().amax(0).tolist()
    return {"loss": loss, "gradient norm": norm}


def require_agreement(
    name: str, reference: str, differences: Mapping[str, float], allowed: Mapping[str, float]
) -> None:
    """Raise Disagreement unless each difference is within what is allowed."""
    for quantity, difference in differences.items():
        if not difference <= allowed[quantity]:
            raise Disagreement(
                f"{name} and {reference} do not train alike: {quantity} differs by "
                f"{difference:.2e}, allowed {allowed[quantity]:.2e}; they were not timed"
            )


def _set_eps(optimizer: torch.optim.Optimizer, eps: float) -> None:
    for group in optimizer.param_groups:
        group["eps"] = eps


def _copied_weights(loop: TrainingLoop) -> list[Tensor]:
    """Copies of this rank's shards in fp64."""
    return [weight.double() for weight in local_weights(loop.model).values()]


def _update(loop: TrainingLoop, before: Sequence[Tensor]) -> list[Tensor]:
    """How far this rank's weights have moved from `before`."""
    pairs = zip(_copied_weights(loop), before, strict=True)
    return [after - start for after, start in pairs]


def _distance(update: Sequence[Tensor], expected: Sequence[Tensor], setup: TrainingSetup) -> float:
    """L2 norm of the difference over all ranks, relative to that of `expected`."""
    pairs = zip(update, expected, strict=True)
    squares = sum((mine - right).square().sum().item() for mine, right in pairs)
    length = sum(right.square().sum().item() for right in expected)
    squares, length = setup.ranks.sum(squares, length)
    return (squares / length) ** 0.5
