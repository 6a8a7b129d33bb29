"""The passes of a step through a model that is not divided into stages."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.data.loader import Batch
from megatron_zpp.model.attention.sequences import PassRecord
from megatron_zpp.model.gpt import GPT
from megatron_zpp.parallel.heartbeat import MainThread
from zeropp import Sharding


@dataclass(frozen=True, kw_only=True)
class OneStage:
    """Runs a step with the interface of `Pipeline`, one micro-batch after another."""

    sharding: Sharding
    main_thread: MainThread

    @property
    def roots(self) -> tuple[GPT, ...]:
        """The models that are called one by one: only the whole one."""
        return (self.sharding.model,)

    def forward_backward(
        self,
        samples: Iterator[tuple[int, Batch]],
        scales: Sequence[float | Tensor],
        seed_dropout: Callable[[int], None],
        routing: Sequence[PassRecord] | None = None,
    ) -> list[Tensor]:
        """Run all passes of a step; return the losses, unscaled, 0-d.

        `samples` yields the number of each micro-batch's first sample, and the micro-batch.
        Gradients are those of the sum of the losses, each times its scale. `routing` has a record
        for each micro-batch, if layers record anything.
        """
        losses: list[Tensor] = []
        for (first_sample, batch), scale in zip(samples, scales, strict=True):
            self.main_thread.mark()
            seed_dropout(first_sample)
            with self.sharding.micro_step(last=len(losses) == len(scales) - 1):
                record = None if routing is None else routing[len(losses)]
                loss = self.sharding.model(*batch.inputs(), routing=record)
                (loss * scale).backward()
            if record is not None:
                record.forget_tokens(self.sharding.model.part.layers)
            losses.append(loss.detach())
        return losses

    def sum_tied_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the ends of the model are on the same rank."""
