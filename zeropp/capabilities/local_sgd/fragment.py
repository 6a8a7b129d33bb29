"""A fragment of the weights that is synchronized at once, while training may go on.

Sources: DiLoCo (Douillard et al. 2023, arXiv:2311.08105), algorithm 1; Streaming DiLoCo (Douillard
et al. 2025, arXiv:2501.18512), algorithm 2, for fragments, the delay and the merge weight.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from zeropp.capabilities.local_sgd.averaged_buffers import OUTER
from zeropp.capabilities.local_sgd.outer_group import OuterGroup
from zeropp.capabilities.local_sgd.outer_mean import OuterMean
from zeropp.capabilities.local_sgd.trained_weights import HeldModel, TrainedWeights
from zeropp.errors import InputError

HOST = torch.device("cpu")
SUMMED = 1 << 16  # values of which PyTorch makes 64-bit ones at a time
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class OuterOptions:
    """The outer optimizer: bits per element of the pseudo-gradient, and SGD with Nesterov momentum.

    feedback: error feedback (default: with two bits). on_host: the global parameters are in the
    host's memory. mixing: the merge weight, the share of a replica's own weights if it has taken
    steps during the exchange.
    """

    bits: int = 4
    feedback: bool | None = None
    lr: float = 0.7
    momentum: float = 0.5
    on_host: bool = False
    mixing: float = 0.5

    def mean(self, sizes: Sequence[int], group: OuterGroup, device: torch.device) -> OuterMean:
        """Return the mean over replicas of tensors of these sizes (elements)."""
        return OuterMean(sizes, group, self.bits, device, feeds=self.feedback)

    def nesterov(self, momentum: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Return the momentum and the outer step after a mean pseudo-gradient."""
        momentum = self.momentum * momentum + mean
        return momentum, self.lr * (mean + self.momentum * momentum)


def fragments_of(model: HeldModel, count: int) -> list[frozenset[str]]:
    """Cut a model into `count` fragments, in its order and of about equal sizes; some may be empty.

    Returns the names of each one's parameters. Ranks that hold a parameter of one name, as tied
    embeddings, have it in the same fragment.
    """
    sizes = map(Tensor.numel, model.trained.values())
    places = dict(zip(model.trained, places_in(sizes, count), strict=True))
    agreed: dict[str, int] = {}
    for others in model.gather(places):
        agreed = {**others, **agreed}
    return [
        frozenset(name for name in places if agreed[name] == fragment) for fragment in range(count)
    ]


def places_in(sizes: Iterable[int], count: int) -> list[int]:
    """Return in which of `count` fragments each parameter is, by the middle of its elements."""
    sizes = list(sizes)
    ends, total = accumulate(sizes), sum(sizes)
    return [(2 * end - size) * count // (2 * total) for size, end in zip(sizes, ends, strict=True)]


def require_finite(tensors: Sequence[Tensor], own: Sequence[Tensor]) -> None:
    """Raise InputError unless tensors are finite; another replica is to blame if `own` are."""
    are_finite = [all(bool(part.isfinite().all()) for part in each) for each in (tensors, own)]
    if not are_finite[0]:
        raise InputError(
            f"zeropp.sync_every: weights of {'another' if are_finite[1] else 'this'} node are not "
            "finite, and are not merged: look at its losses, and go on from the last checkpoint"
        )


@dataclass(kw_only=True, eq=False)
class Fragment:
    """Parameters that are synchronized together, the fragment `number` of the model.

    `agreed` are the global parameters, the same on all replicas; `momentum` is the outer momentum
    of the elements that this replica owns. The result of the exchange under way is merged after
    step `merges_at`; 0: none is under way.
    """

    number: int
    weights: TrainedWeights
    group: OuterGroup
    options: OuterOptions
    mean: OuterMean = field(init=False)
    agreed: list[Tensor] = field(init=False)
    momentum: Tensor = field(init=False)
    merges_at: int = field(init=False, default=0)
    running: Future[list[Tensor]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        weights = self.weights.read()
        device, sizes = weights[0].device, [len(each) for each in weights]
        self.mean = self.options.mean(sizes, self.group, device)
        self.momentum = torch.zeros_like(self.mean.error)
        where = HOST if self.options.on_host else device
        self.agreed = [each.to(where, copy=True) for each in weights]

    @cached_property
    def beginning(self) -> dict[str, int]:
        """Checksums by name, in any order of summing, of the global parameters at first use."""
        parts = (each.view(torch.int32).split(SUMMED) for each in self.agreed)
        sums = (sum(part.sum(dtype=torch.int64) for part in each) for each in parts)
        return dict(zip(self._names, map(int, sums), strict=True))

    def average_gradients(self) -> None:
        """Average the gradients over replicas; one that a replica lacks counts as zeros."""
        gradients, own = self.weights.gradients(), self.weights.have_gradients()
        self.mean.content = self._content(0)
        averaged = self._start(lambda: self.mean.run(gradients)).result()
        self.weights.write_gradients(averaged, list(map(bool, self.group.sum(*own))))

    def agree(self) -> None:
        """Make the weights, which are the same on all replicas, the global parameters."""
        for agreed, each in zip(self.agreed, self.weights.read(), strict=True):
            agreed.copy_(each)

    def restart(self) -> None:
        """Go on from the weights as they are, which are the same on all replicas."""
        self.agree()
        self.momentum.zero_()
        self.mean.forget()

    @torch.no_grad()
    def start(self, merges_at: int) -> None:
        """Start to average pseudo-gradients; the result is due after the step `merges_at`.

        The exchange before must have been merged.
        """
        differences = self.differences()
        self.mean.content = self._content(merges_at)
        self.running = self._start(lambda: self.mean.run(differences, self._nesterov))
        self.merges_at = merges_at

    def differences(self) -> list[Tensor]:
        """Return the pseudo-gradients: global parameters less this replica's."""
        pairs = zip(self.agreed, self.weights.read(), strict=True)
        return [agreed.to(own.device) - own for agreed, own in pairs]

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the exchange under way, and update the global parameters."""
        if self.running is not None:
            updates, self.running = self.running.result(), None
            require_finite(updates, self.weights.read())
            for agreed, update in zip(self.agreed, updates, strict=True):
                agreed -= update.to(agreed.device)

    @torch.no_grad()
    def merge(self, mixing: float) -> None:
        """Wait for the exchange, and set weights to mixing x own + (1 - mixing) x global."""
        self.receive()
        self._mix(mixing, self.weights.names)
        self.merges_at = 0

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds of it, by name and sharded as the weights are.

        Waits for the exchange under way, whose result is then part of the global parameters.
        """
        self.receive()
        parts = {
            "agreed": self.agreed,
            "momentum": self.mean.spread(self.momentum),
            "error": self.mean.spread(self.mean.error),
        }
        if self.mean.feeds:
            parts["unsent"] = self.mean.joined(self.mean.unsent)
        tensors = {
            f"{OUTER}{name}.{part}": tensor
            for part, values in parts.items()
            for name, tensor in self.weights.saved(values).items()
        }
        merges_at = torch.tensor(self.merges_at)
        return tensors | {f"{OUTER}{name}.merges_at": merges_at.clone() for name in self._names}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` has returned, read from a checkpoint of as many replicas.

        If the weights were in other fragments, those with an exchange get its result at once.
        """
        self.receive()

        def values(part: str) -> list[Tensor]:
            named = {name: state[f"{OUTER}{name}.{part}"] for name in self._names}
            return self.weights.loaded(named)

        for agreed, each in zip(self.agreed, values("agreed"), strict=True):
            agreed.copy_(each)
        self.momentum = self.mean.own(values("momentum"))
        self.mean.error = self.mean.own(values("error"))
        if self.mean.feeds:
            unsent = values("unsent")
            self.mean.unsent = [self.mean.own(unsent, node) for node in range(self.group.size)]
        merges_at = {name: int(state[f"{OUTER}{name}.merges_at"]) for name in self._names}
        self.merges_at = max(merges_at.values())
        if len(set(merges_at.values())) > 1:
            self._mix(self.options.mixing, {name for name in self._names if merges_at[name]})
            self.merges_at = 0

    @property
    def _names(self) -> list[str]:
        return [*self.weights.named]

    def _content(self, merges_at: int) -> int:
        """Return what identifies an exchange, in 56 bits."""
        text = repr((self.number, merges_at, self.beginning))
        return int.from_bytes(sha256(text.encode()).digest()[:7], "big")

    def _nesterov(self, mean: Tensor) -> Tensor:
        self.momentum, step = self.options.nesterov(self.momentum, mean)
        return step

    @torch.no_grad()
    def _mix(self, mixing: float, names: set[str] | frozenset[str]) -> None:
        """Set the weights of these names to mixing x own + (1 - mixing) x global."""
        values = []
        for name, agreed, own in zip(self._names, self.agreed, self.weights.read(), strict=True):
            share = mixing if name in names else 1.0
            values.append(agreed.to(own.device).lerp(own, share) if share else agreed)
        self.weights.write(values)

    def _start(self, work: Callable[[], Result]) -> Future[Result]:
        """Run work on the group's thread; on a GPU in the order of what this thread has queued."""
        device = self.mean.error.device
        if device.type != "cuda":
            return self.group.start(work)
        stream = torch.cuda.current_stream(device)

        def on_stream() -> Result:
            with torch.cuda.stream(stream):
                return work()

        return self.group.start(on_stream)
