"""What random calls are compared with: one process that runs the micro-batches of all ranks."""

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call

from tests.zeropp.sharding.near import NEAR, largest, rounding_of
from tests.zeropp.sharding.random_models import Batch, RandomModel


class OneProcess:
    """The reference: one model, the buffers of every rank, plain PyTorch."""

    def __init__(self, model: RandomModel, world: int, dtype: torch.dtype) -> None:
        self.model, self.world, self.dtype = model, world, dtype
        self.weights = dict(model.named_parameters())
        self.buffers = [copy.deepcopy(dict(model.named_buffers())) for _ in range(world)]
        self.terms: dict[str, torch.Tensor] = {}  # by weight: the sum of its gradients' magnitudes
        for unit in (model, *model.blocks):
            unit.register_forward_pre_hook(self.round_inputs)

    def round_inputs(self, module: nn.Module, inputs: tuple) -> tuple:
        """As a unit does."""
        return tuple(
            each.to(self.dtype) if isinstance(each, torch.Tensor) else each for each in inputs
        )

    def loss(self, batch: Batch) -> torch.Tensor:
        """Of a micro-batch, computed in `dtype`."""
        if self.dtype == torch.float32:
            return batch.loss(self.model)
        weights = {name: weight.to(self.dtype) for name, weight in self.weights.items()}
        return batch.loss(lambda *inputs: functional_call(self.model, weights, inputs))

    def pass_of(self, rank: int, run: Callable[[], None]) -> None:
        """Run something with a rank's own buffers."""
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers[rank][name])
        run()
        self.buffers[rank] = copy.deepcopy(dict(self.model.named_buffers()))

    def add_gradients(self, batch: Batch, rank: int, divisor: int) -> None:
        """Add a rank's gradients of a micro-batch, divided, to those of the model."""
        before = {name: weight.grad for name, weight in self.weights.items()}
        self.model.zero_grad()
        self.pass_of(rank, lambda: (self.loss(batch) / divisor).backward())
        for name, weight in self.weights.items():
            if weight.grad is not None:
                weight.grad /= self.world
                self.terms[name] = self.terms.get(name, 0) + weight.grad.abs()
                weight.grad += 0 if before[name] is None else before[name]
            else:
                weight.grad = before[name]

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.model.zero_grad()
        self.terms.clear()

    def near(self, name: str) -> float:
        """How near a weight's gradient must be: terms that cancel leave their errors."""
        terms = float(torch.as_tensor(self.terms.get(name, 0.0)).max())
        near = NEAR * max(largest(self.weights[name].grad), terms)
        if self.dtype == torch.float32:
            return near
        return near + self.most_roundings() * rounding_of(terms, self.dtype, self.world)

    def most_roundings(self) -> int:
        """Of an element of a gradient: when it is sent, between hops, and when uses are added."""
        uses = [self.model.order.count(index) for index in range(len(self.model.blocks))]
        return 2 + max(2, *uses)  # the root's stem may be its head, too
