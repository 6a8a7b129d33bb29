"""What DeepSpeed's ZeRO-3 fetches in a step with full recomputation, replayed tensor by tensor.

Hooks of the modules fetch weights. A layer's backward pass runs its forward hooks again, for the
recomputation, and then its backward hooks; ZeRO++ reads its secondary copy in fetches from backward
hooks only. Weights that are used again within the reuse distance are not released, and each hook
fetches ahead while live weights and the bucket allow it. Source: the release of June 2023
(runtime/zero/partitioned_param_coordinator.py), with its default limits.
"""

from collections import Counter, deque
from dataclasses import dataclass

LIVE, PREFETCH, REUSE = 1_000_000_000, 50_000_000, 1_000_000_000  # weights
LAYER = (3, 1, 4, 4)  # weights of a layer's matrices, in squares of the width


@dataclass(frozen=True)
class Use:
    """One hook that needs a weight matrix."""

    tensor: tuple[int, int]  # layer, matrix
    size: int
    is_forward: bool


@dataclass(frozen=True, kw_only=True)
class Fetches:
    """Weights fetched in a step, as a share of all, and the number of gathers, by kind of hook."""

    forward: float
    backward: float
    forward_gathers: int
    backward_gathers: int


def fetches(num_layers: int, width: int) -> Fetches:
    """Return what a step fetches."""
    uses = _uses(num_layers, width)
    last_step_fetched: dict[tuple[int, int], int] = {}
    available: dict[tuple[int, int], int] = {}
    queue = deque(enumerate(uses))
    weights: Counter[bool] = Counter()
    gathers: Counter[bool] = Counter()

    def fetch(use: Use, is_forward: bool) -> None:
        available[use.tensor] = use.size
        weights[is_forward] += use.size
        gathers[is_forward] += 1

    for step, use in enumerate(uses):
        if use.tensor not in available:
            fetch(use, use.is_forward)
        if last_step_fetched.get(use.tensor, -1) < step:
            index, ahead = queue.popleft()
            last_step_fetched[ahead.tensor] = index
        ahead_weights, limit = 0, min(LIVE - sum(available.values()), PREFETCH)
        while queue and ahead_weights < limit:
            index, ahead = queue.popleft()
            last_step_fetched[ahead.tensor] = index
            if ahead.tensor not in available:
                fetch(ahead, use.is_forward)
                ahead_weights += ahead.size
        if last_step_fetched[use.tensor] <= step and not _is_reused(uses, step):
            del available[use.tensor]
    total = num_layers * sum(LAYER) * width**2
    return Fetches(
        forward=weights[True] / total,
        backward=weights[False] / total,
        forward_gathers=gathers[True],
        backward_gathers=gathers[False],
    )


def _uses(num_layers: int, width: int) -> list[Use]:
    """Return the hooks of a step in order."""

    def layer_uses(layer: int, *, is_forward: bool) -> list[Use]:
        uses = [Use((layer, i), size * width**2, is_forward) for i, size in enumerate(LAYER)]
        return uses if is_forward else uses[::-1]

    forward = [use for layer in range(num_layers) for use in layer_uses(layer, is_forward=True)]
    backward = [
        use
        for layer in reversed(range(num_layers))
        for is_forward in (True, False)
        for use in layer_uses(layer, is_forward=is_forward)
    ]
    return forward + backward


def _is_reused(uses: list[Use], step: int) -> bool:
    """Whether the weight of a use is needed again within the reuse distance."""
    passed = 0
    for use in uses[step + 1 :]:
        if passed >= REUSE:
            return False
        if use.tensor == uses[step].tensor:
            return True
        passed += use.size
    return False
