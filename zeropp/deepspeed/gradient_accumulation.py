"""Which micro-batches make a step, when ranks average their gradients, and whole steps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from zeropp.deepspeed.runtime.dataloader import RepeatingLoader
from zeropp.errors import RefusedCall, Unavailable


class GradientAccumulation:
    """The methods of `Engine` about the micro-batches of a step.

    With `"managed_gradient_accumulation": false`, each `step()` ends one.
    """

    training_dataloader: DataLoader | None = None
    _repeated_data: RepeatingLoader | None = None

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Take a whole step with the next micro-batches; return their mean loss over all ranks.

        `data_iter` yields what the model is called with: a dict of its keyword arguments, a tuple
        or list of its arguments, or the only one. By default it is the loader of
        `zeropp.initialize`, over and over. The model returns its loss, as it is, as `.loss` or as
        `["loss"]`, or first in a tuple. Raises StopIteration at the end of the data, and InputError
        for a model that returns no loss, without data, and if there is some for a part of a step.
        """
        if data_iter is None:
            if self._repeated_data is None and self.training_dataloader is None:
                raise RefusedCall("train_batch() needs data: give it, or training_data at first")
            self._repeated_data = self._repeated_data or RepeatingLoader(self.training_dataloader)
            data_iter = self._repeated_data
        micro_batches = [*islice(data_iter, self.batch.micro_batches)]
        if not micro_batches:
            raise StopIteration
        if len(micro_batches) < self.batch.micro_batches:
            raise RefusedCall(
                f"train_batch() takes {self.batch.micro_batches} micro-batches, and the data ended "
                f"after {len(micro_batches)}: leave out the last ones, or use RepeatingLoader"
            )
        total = torch.zeros((), device=self.device)
        for micro_batch in micro_batches:
            arguments, keywords = _arguments(micro_batch, self.device)
            loss = _loss_in(self(*arguments, **keywords))
            self.backward(loss)
            self.step()
            total += loss.detach().sum() / self.batch.micro_batches
        dist.all_reduce(total, group=self.sharding.group)
        return total / self.world_size

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far; setting the number says also which of its step the next one is."""
        return self._micro_steps

    @micro_steps.setter
    def micro_steps(self, count: int) -> None:
        self._micro_steps = count
        self._micro_batches_done = count % self.batch.micro_batches

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes only add up this rank's gradients; the next one outside sends all.

        Micro-batches inside are not counted, and `step()` may not be called. Raises InputError at
        stages 2 and 3, which average gradients after each pass, and inside itself.
        """
        if not self.sharding.plan.reduces_once and self.sharding.units:
            stage = self.sharding.stage
            raise RefusedCall(
                f"the no_sync context manager is incompatible with ZeRO stage {stage}, which "
                "averages gradients after each backward pass: use stage 0 or 1, "
                "coalesce_grad_reduction(), or zeropp.reduce_gradients_once"
            )
        if self._in_no_sync:
            raise RefusedCall(
                "no_sync context manager reentry is unsupported, as is coalesce_grad_reduction() "
                "around it: enter one of them, once"
            )
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False
            self._has_unsent = self._has_unsent or self._backwards > 0
            self._end_micro_batch()

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Average the gradients of the backward passes inside once, at the end; then call `step()`.

        Those passes only add up this rank's whole gradients. Raises InputError at stage 0, inside
        itself and `no_sync`, and where the JSON leaves the micro-batches to the caller.
        """
        if not self.managed_gradient_accumulation():
            raise RefusedCall(
                'engine.coalesce_grad_reduction() with "managed_gradient_accumulation": false: '
                "step() ends the accumulation there; leave one of them out"
            )
        if self.sharding.stage == 0:
            raise Unavailable("engine.coalesce_grad_reduction() needs ZeRO stage 1, 2 or 3")
        if self._in_no_sync:
            raise RefusedCall(
                "engine.coalesce_grad_reduction() nested in itself or in no_sync(): enter it once"
            )
        self._in_no_sync = self._coalesces = True
        try:
            yield
        finally:
            self._in_no_sync = self._coalesces = False
        if self._backwards:
            self.sharding.reduce_accumulated()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates the weights."""
        if self._in_no_sync:
            return False
        if not self.managed_gradient_accumulation():
            return self._in_step
        if self._is_gradient_accumulation_boundary is not None:
            return self._is_gradient_accumulation_boundary
        return self._micro_batches_done + 1 >= self.batch.micro_batches

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next backward pass is the last one of a step.

        To be called before each backward pass, from the first one on. Raises InputError where the
        JSON leaves that to `step()`.
        """
        if not self.managed_gradient_accumulation():
            raise RefusedCall(
                'set_gradient_accumulation_boundary() with "managed_gradient_accumulation": false: '
                "each step() ends an accumulation; leave one of them out"
            )
        self._is_gradient_accumulation_boundary = bool(is_boundary)
        self._announced += 1
        self._begin_micro_batch()

    def _begin_micro_batch(self) -> None:
        self.sharding.begin_micro_step(
            last=self.is_gradient_accumulation_boundary(), accumulate=self._coalesces
        )

    def _end_micro_batch(self) -> None:
        self._forwards = self._backwards = self._announced = 0
        self._is_scaled = False

    def _mid_step(self) -> bool:
        if not self.managed_gradient_accumulation():
            return self._forwards > 0
        if self._is_gradient_accumulation_boundary is not None:
            return self._announced > 0 or not self._is_gradient_accumulation_boundary
        return self._micro_batches_done > 0 or self._has_unsent

    def _begin_step_again(self) -> None:
        """Discard what the micro-batches of this step have left."""
        self.zero_grad()
        self._end_micro_batch()
        self._is_gradient_accumulation_boundary = None
        self._micro_steps -= self._micro_batches_done
        self._micro_batches_done = 0
        self._losses = torch.zeros_like(self._losses)


def _arguments(batch: Any, device: torch.device) -> tuple[tuple, dict]:
    """Return the arguments and keyword arguments that a batch stands for, on the device."""
    moved = pytree.tree_map_only(torch.Tensor, lambda each: each.to(device), batch)
    if isinstance(moved, Mapping):
        return (), dict(moved)
    return tuple(moved) if isinstance(moved, tuple | list) else (moved,), {}


def _loss_in(output: Any) -> torch.Tensor:
    """Return the loss in what a model returned; raise RefusedCall if there is none."""
    loss = output[0] if isinstance(output, tuple | list) and output else output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    loss = getattr(output, "loss", loss)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise RefusedCall(
            f"train_batch() needs a model that returns its loss, and it returned a "
            f"{type(output).__name__}: call engine(batch), engine.backward and engine.step instead"
        )
    return loss
