"""Pipeline parallelism: ranks share out the layers, and micro-batches pass from rank to rank.

Between its passes a stage's weights are sharded as ZeRO says, and hpZ's copy serves all
micro-batches. PyTorch's own runtime for pipelines keeps weights and gradients whole during a step,
and some of its schedules give wrong gradients at stage 3 (docs/adr/0017).
Ranks send their neighbours activations onward and gradients back. Each direction has a process
group of its own, so that on no communicator two ranks wait for each other. The tensors of a channel
arrive in the order in which they were sent.
Shapes: B batch, S sequence, H hidden, V padded vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_zpp.data.loader import Batch
from megatron_zpp.model.attention.cache import KeyValueCache
from megatron_zpp.model.attention.sequences import PassRecord
from megatron_zpp.model.gpt import GPT, Blocks
from megatron_zpp.parallel.collectives import sum_whole
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.parallel.pipeline_schedule import Pass, passes
from zeropp import Sharding
from zeropp.optim import gradient_parts
from zeropp.wire import RankGroup, Transfer

SeedDropout = Callable[[int, int], None]  # by the micro-batch's first sample, and the stage


@dataclass(kw_only=True)
class InFlight:
    """A micro-batch between its forward and its backward pass through a stage."""

    received: Tensor | None
    output: Tensor
    sent: Transfer | None


@dataclass(kw_only=True)
class Step:
    """The micro-batches of a step on a rank, and the losses of those that have left the last stage.

    `samples` yields the number of each micro-batch's first sample, and the micro-batch; `scales`
    has what each loss is multiplied by, `routing` what layers record of each.
    """

    samples: Iterator[tuple[int, Batch]]
    scales: Sequence[float | Tensor]
    shape_of: Callable[[Tensor], tuple[int, ...]]
    seed_dropout: SeedDropout
    routing: Sequence[PassRecord] | None = None
    losses: list[Tensor] = field(default_factory=list)
    in_flight: dict[tuple[int, int], InFlight] = field(default_factory=dict)  # by chunk and number
    _read: dict[int, tuple[int, Batch]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._read[0] = next(self.samples)
        self.shape = self.shape_of(self._read[0][1].tokens)

    def micro_batch(self, index: int, *, keep: bool) -> tuple[int, Batch]:
        """Return a micro-batch; `keep` it if it is needed again."""
        if index not in self._read:
            self._read[index] = next(self.samples)
        return self._read[index] if keep else self._read.pop(index)


def joined(whole: GPT, stages: Sequence[Sharding], ranks: Ranks) -> Sharding:
    """Return a rank's stages of a model as one sharding, whose model is a `Pipeline`."""
    ends = [each.model.tokens for each in stages if whole.head is None]
    pipeline = Pipeline(whole, stages, ranks)
    return Sharding.join(pipeline, stages, at_both_ends=[each for each in ends if each is not None])


class Pipeline(nn.Module):
    """A rank's stages as one model, which has the parameters of all of them.

    A stage is a GPT of a range of layers; `stages` are the shardings of this rank's. `whole` is the
    whole model, on the meta device. Called without gradients it
    returns what the whole model would: logits on all ranks, or the loss on those of the last stage,
    and zero on the others.
    """

    def __init__(self, whole: GPT, stages: Sequence[Sharding], ranks: Ranks) -> None:
        super().__init__()
        self.config, self.vocab_size, self.part = whole.config, whole.vocab_size, whole.part
        self.stages, self._ranks = tuple(stages), ranks
        is_fp32 = whole.config.fp32_residual_connection
        self._dtype = torch.float32 if is_fp32 else stages[0].compute_dtype  # of activations
        self._rows = ranks.context_size * (ranks.tensor_size if whole.part.splits_rows else 1)
        self._num_parameters = {
            trained_only: whole.num_parameters(trained_only=trained_only)
            for trained_only in (False, True)
        }
        self._padded_vocab_size = whole.padded_vocab_size
        self._adopt(whole)
        self.grad_is_partial = whole.grad_is_partial
        self.names_elsewhere = _names(whole) - _names(self)
        self.channels = connect(ranks, is_ring=len(self.stages) > 1)
        is_end = self.roots[0].part.is_first or self.roots[-1].part.is_last
        self.ties_ends = whole.head is None and is_end and whole.tokens.weight.requires_grad
        self._sent: Transfer | None = None  # the last one that nobody waits for elsewhere

    def forward_backward(
        self,
        samples: Iterator[tuple[int, Batch]],
        scales: Sequence[float | Tensor],
        seed_dropout: SeedDropout,
        routing: Sequence[PassRecord] | None = None,
    ) -> list[Tensor]:
        """Run all passes of a step; return the losses, unscaled, 0-d, on the last stage's ranks.

        Gradients are those of the sum of the losses, each times its scale. `routing` has a record
        for each micro-batch, if layers record anything.
        """
        step = Step(
            samples=samples,
            scales=scales,
            seed_dropout=seed_dropout,
            routing=routing,
            shape_of=partial(self._shape, splits=True),
        )
        place, size = self._ranks.pipeline_rank, self._ranks.pipeline_size
        order = passes(place, size, len(scales), len(self.stages))
        arriving = self._expect(step, order[0])
        for each, following in zip_longest(order, order[1:]):
            self._ranks.main_thread.mark()
            arrived, arriving = arriving, following and self._expect(step, following)
            run = self._forward if each.is_forward else self._backward
            run(step, each, arrived and arrived.wait())
        self._await_sent()
        return step.losses

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        edges: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return the loss or, without labels, logits [B, S, V]; arguments as of `GPT.forward`."""
        assert not torch.is_grad_enabled(), "a pipeline is trained by forward_backward"
        for root in self.roots:
            received = None
            if not root.part.is_first:
                shape = self._shape(tokens, splits=labels is not None)
                channel = self.channels.activations_in
                received = channel.receive(shape, self._dtype, self._ranks.device).wait()
            output = root(tokens, labels, loss_mask, position_ids, edges, cache, received)
            if not root.part.is_last:
                self._await_sent()
                self._sent = self.channels.activations_out.send(output)
        if labels is None:
            return self._logits_of_last(output, tokens, cache)
        return output if root.part.is_last else output.new_zeros((), dtype=torch.float32)

    @property
    def roots(self) -> tuple[GPT, ...]:
        """The models of the stages, which are called one by one."""
        return tuple(stage.model for stage in self.stages)

    def num_parameters(self, *, trained_only: bool = False) -> int:
        """Return the number of weights of the whole model."""
        return self._num_parameters[trained_only]

    def train(self, mode: bool = True) -> "Pipeline":
        """Set training or evaluation mode."""
        for root in self.roots:
            root.train(mode)
        return super().train(mode)

    def sum_tied_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Add up what the first and the last stage have of the tied embedding's gradient."""
        if self.ties_ends:
            for part in gradient_parts(optimizer, [self.tokens.weight]):
                part.copy_(sum_whole(part.to(self._ranks.device), self._ranks.ends_of_pipeline))

    def _adopt(self, whole: GPT) -> None:
        """Register the modules of the stages under the names they have in the whole model."""
        for name, _ in whole.named_children():
            if name != "blocks":
                owners = (getattr(root, name) for root in self.roots)
                self.add_module(name, next((each for each in owners if each is not None), None))
                continue
            self.blocks = Blocks(
                {layer: root.blocks[layer] for root in self.roots for layer in root.part.layers}
            )

    def _expect(self, step: Step, each: Pass) -> Transfer | None:
        """Begin to receive what a pass needs of the rank before or after this one."""
        part, channels = self.roots[each.chunk].part, self.channels
        channel = channels.activations_in if each.is_forward else channels.gradients_in
        is_end = part.is_first if each.is_forward else part.is_last
        return None if is_end else channel.receive(step.shape, self._dtype, self._ranks.device)

    def _forward(self, step: Step, each: Pass, received: Tensor | None) -> None:
        root = self.roots[each.chunk]
        is_last_use = each.chunk == len(self.stages) - 1
        first_sample, batch = step.micro_batch(each.micro_batch, keep=not is_last_use)
        stage = self._ranks.pipeline_rank + each.chunk * self._ranks.pipeline_size
        step.seed_dropout(first_sample, stage)
        if received is not None:
            received.requires_grad_()
        record = None if step.routing is None else step.routing[each.micro_batch]
        output, sent = root(*batch.inputs(), received=received, routing=record), None
        if root.part.is_last:
            step.losses.append(output.detach())
            output = output * step.scales[each.micro_batch]
        else:
            sent = self.channels.activations_out.send(output)
        step.in_flight[each.chunk, each.micro_batch] = InFlight(
            received=received, output=output, sent=sent
        )

    def _backward(self, step: Step, each: Pass, gradient: Tensor | None) -> None:
        sharding = self.stages[each.chunk]
        entry = step.in_flight.pop((each.chunk, each.micro_batch))
        sharding.begin_micro_step(last=each.micro_batch == len(step.scales) - 1)
        if entry.sent is not None:
            entry.sent.wait()  # the next stage has long used it
        entry.output.backward(gradient)
        if step.routing is not None:
            step.routing[each.micro_batch].forget_tokens(self.roots[each.chunk].part.layers)
        if entry.received is not None:
            self._await_sent()
            self._sent = self.channels.gradients_out.send(entry.received.grad)

    def _shape(self, tokens: Tensor, *, splits: bool) -> tuple[int, ...]:
        """Return the shape of a stage's output for tokens [B, S], or with `splits` of its rows."""
        rows = tokens.shape[1] // (self._rows if splits else 1)
        return len(tokens), rows, self.config.hidden_size

    def _logits_of_last(
        self, output: Tensor, tokens: Tensor, cache: KeyValueCache | None
    ) -> Tensor:
        """Return the last stage's logits, in fp32, on all ranks."""
        logits = output.float()
        if not self.roots[-1].part.is_last:
            rows = tokens.shape[1] if cache is None else 1
            logits = output.new_empty(
                len(tokens), rows, self._padded_vocab_size, dtype=torch.float32
            )
        group = self._ranks.mesh.get_group("pipe")
        dist.broadcast(logits, self._ranks.pipeline[-1], group=group)
        return logits

    def _await_sent(self) -> None:
        if self._sent is not None:
            self._sent.wait()
            self._sent = None


def _names(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters and buffers."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return frozenset(name for name, _ in tensors)


@dataclass(frozen=True, kw_only=True)
class Channels:
    """Pairs of this rank and the one before or after it in a pipeline; None at an end."""

    activations_in: RankGroup | None
    activations_out: RankGroup | None
    gradients_in: RankGroup | None
    gradients_out: RankGroup | None


def connect(ranks: Ranks, *, is_ring: bool) -> Channels:
    """Connect this rank with its neighbours in the pipeline; all ranks call it.

    In a ring, the last sends activations to the first, which has several stages.
    """
    line, place = ranks.pipeline, ranks.pipeline_rank
    channels: dict[str, RankGroup] = dict.fromkeys(field.name for field in fields(Channels))
    for index in range(len(line) if is_ring else len(line) - 1):
        following = (index + 1) % len(line)
        for what, end, other_end in (("activations", "out", "in"), ("gradients", "in", "out")):
            for own, way in ((index, end), (following, other_end)):
                if own == place:  # the members meet here, in the same order on every rank
                    members = line[index], line[following]
                    group = ranks.rank_group("pipeline", members, name=f"{what} {index}")
                    dist.barrier(group=group.group)  # else it may connect at the first message
                    channels[f"{what}_{way}"] = group
    return Channels(**channels)
