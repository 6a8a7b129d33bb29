"""`engine.train_batch`: a whole step in one call, as DeepSpeed's pipelines have it."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from zeropp.deepspeed.runtime.dataloader import RepeatingLoader
from zeropp.errors import RefusedCall


class WholeSteps:
    """The method of `Engine` that takes whole steps; `training_dataloader` has its data."""

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
