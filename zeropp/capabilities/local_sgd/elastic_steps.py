"""Elastic DiLoCo: each outer step is committed by all remaining members, or by none.

A replica that joins gets the global parameters of a member; its first pseudo-gradient is zero, and
the mean does not count it. When membership changes, the outer momentum and the rounding errors
(error feedback) move to the new owners; those of replicas that have left are reset to zero. With
error feedback a replica keeps what it has not sent, except for the elements that it owns now.
"""

import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zeropp.capabilities.local_sgd.elastic_group import ElasticGroup, Result
from zeropp.capabilities.local_sgd.fragment import HOST, Fragment, require_finite
from zeropp.capabilities.local_sgd.local_steps import LocalSteps
from zeropp.capabilities.local_sgd.outer_mean import OuterMean
from zeropp.capabilities.local_sgd.rounds import Members
from zeropp.ranks.coordination import gather_objects

DEALT_BITS = 8  # of a number on its way to a new owner, where fewer than 32 are sent
FP32_BYTES = 4

log = logging.getLogger("zeropp")


class Progress(Protocol):
    """What a joining replica gets beside the weights: the counters of the run."""

    def state(self) -> Any: ...

    def load(self, state: Any) -> None: ...


@dataclass
class PendingFragment:
    """What a fragment will be if the round is committed."""

    fragment: Fragment
    mean: OuterMean
    momentum: Tensor
    values: Sequence[Tensor] = ()

    def run(self, tensors: Sequence[Tensor], num_terms: int) -> None:
        """Form the outer step from the mean of the tensors."""

        def nesterov(mean: Tensor) -> Tensor:
            self.momentum, step = self.fragment.options.nesterov(self.momentum, mean)
            return step

        self.values = self.mean.run(tensors, nesterov, num_terms)

    def commit(self) -> None:
        """Give the fragment this state."""
        self.fragment.mean, self.fragment.momentum = self.mean, self.momentum


@dataclass(frozen=True, kw_only=True)
class JoinMessage:
    """What a joining replica gets: the numbers of the fragments that are due, and the rest.

    agreed: the global parameters of all fragments, flat fp32.
    """

    due: Sequence[int]
    progress: Any = None
    agreed: Mapping[int, Sequence[Tensor]]


@dataclass(kw_only=True)
class ElasticSteps(LocalSteps):
    """`LocalSteps` whose replicas join and leave."""

    group: ElasticGroup
    progress: Progress | None = None

    def follow(self, progress: Progress) -> None:
        """Send this progress to replicas that join; to be called before the first outer step."""
        self.progress = progress

    def join(self) -> None:
        """Get weights and progress from the others in their next outer step; take part in it."""
        gather_objects(None)  # the others wait for all ranks once this replica is admitted
        self.group.join()
        self._exchange([], 0, 0)
        self.has_stepped_alone = True  # moments are those of this replica

    @property
    def has_peers(self) -> bool:
        """Whether all members are at the same step, with the same weights as this replica."""
        return self.is_alike and not self.group.joins

    def sum(self, values_of: Callable[[int, int], Sequence[float]]) -> list[float]:
        """Return the sums over replicas of `values_of(index, count)`, the same on all of them.

        All ranks of all members call it at the same step, those that join too. It is computed again
        with the remaining members if one ends.
        """

        def work(members: Members) -> tuple[list[PendingFragment], list[float]]:
            group = self.group
            return self._pending(members), group.sum(*values_of(group.node, group.size))

        before = self.group.members
        pending, sums = self.group.hold(work)
        for each in pending:
            each.commit()
        self._report(before)
        return sums

    def _average_gradients(self) -> None:
        own = [(each.weights.gradients(), each.weights.have_gradients()) for each in self.fragments]

        def work(members: Members) -> tuple[list[PendingFragment], list[list[float]]]:
            pending, counts = self._pending(members), []
            for each, (gradients, have_gradients) in zip(pending, own, strict=True):
                each.values = each.mean.run(gradients)
                counts.append(self.group.sum(*have_gradients))
            return pending, counts

        before = self.group.members
        for each, counts in zip(*self._with_buffers(work), strict=True):
            each.commit()
            each.fragment.weights.write_gradients(each.values, list(map(bool, counts)))
        self._report(before)

    @torch.no_grad()
    def _exchange(self, due: Sequence[int], step: int, delay: int) -> None:
        """Take the outer step of the fragments that are due, and admit replicas that join.

        All ranks of a replica take part in the same rounds, even without weights in a fragment.
        """
        if not due and not self.group.joins:
            return
        before = self.group.members  # a replica that joins has taken no steps: zeros
        differences = {each.number: each.differences() for each in self.fragments}
        for each in differences.values():
            require_finite(each, each)

        def work(members: Members) -> tuple[list[PendingFragment], JoinMessage]:
            pending, num_terms = self._pending(members), len(members.with_weights)
            sent = self._send_to_joining(members, due)
            for each in pending:
                number = each.fragment.number
                if number in sent.due:
                    each.run(differences[number], num_terms)
            return pending, sent

        pending, sent = self._with_buffers(work, admits=True)
        for each in pending:
            self._commit(each, sent)
        self.is_alike = len(sent.due) == self.schedule.fragments
        if sent.progress is not None:
            self.progress.load(sent.progress)
        self._report(before)

    def _commit(self, pending: PendingFragment, sent: JoinMessage) -> None:
        pending.commit()
        fragment = pending.fragment
        if sent.agreed:
            for agreed, each in zip(fragment.agreed, sent.agreed[fragment.number], strict=True):
                agreed.copy_(each)
        if fragment.number in sent.due:
            for agreed, update in zip(fragment.agreed, pending.values, strict=True):
                agreed -= update.to(agreed.device)
        if sent.agreed or fragment.number in sent.due:
            fragment.merge(0.0)

    def _with_buffers(self, work: Callable[[Members], Result], *, admits: bool = False) -> Result:
        """Return the result of `work` in a round; average the buffers in it too."""

        def both(members: Members) -> tuple[Result, list[Tensor]]:
            result = work(members)
            own = [self.buffers.message()] * self.group.size
            messages = self.group.exchange(own) if self.buffers.agreed else own
            return result, [messages[place] for place in members.with_weights]

        result, messages = self.group.hold(both, admits=admits)
        self.buffers.take(messages)
        self.buffers.merge(0.0)
        return result

    def _pending(self, members: Members) -> list[PendingFragment]:
        """Return the fragments' state as the members of a round own it."""
        if members.names == self.group.members.names:
            return [PendingFragment(e, e.mean.copy(), e.momentum) for e in self.fragments]
        bits, pending = self.options.bits, []
        for each in self.fragments:
            old, device = each.mean, each.momentum.device
            mean = self.options.mean(old.sizes, self.group, device)
            carrier = OuterMean(old.sizes, self.group, max(bits, DEALT_BITS), device)
            mean.take_unsent(old)
            mean.error = carrier.sum(old.spread(old.error))
            pending.append(PendingFragment(each, mean, carrier.sum(old.spread(each.momentum))))
        return pending

    def _send_to_joining(self, members: Members, due: Sequence[int]) -> JoinMessage:
        """Send global parameters and progress to the joining replicas; return what has arrived."""
        group = self.group
        if not any(each.is_fresh for each in members.nodes):
            return JoinMessage(due=due, agreed={})
        source, nothing = members.with_weights[0], torch.empty(0, dtype=torch.uint8)
        messages = [nothing] * group.size
        if group.node == source:
            parts = [part.to(HOST) for each in self.fragments for part in each.agreed]
            weights = torch.cat(parts) if parts else torch.empty(0)
            others = bytearray(pickle.dumps((due, self.progress.state())))
            others = torch.frombuffer(others, dtype=torch.uint8)
            content = torch.cat((weights.view(torch.uint8), others))
            messages = [content if each.is_fresh else nothing for each in members.nodes]
        content = group.exchange(messages)[source]
        if not members.nodes[group.node].is_fresh:
            return JoinMessage(due=due, agreed={})
        sizes = [size for each in self.fragments for size in each.mean.sizes]
        num_bytes = FP32_BYTES * sum(sizes)
        parts = iter(content[:num_bytes].clone().view(torch.float32).split(sizes))
        agreed = {each.number: [next(parts) for _ in each.agreed] for each in self.fragments}
        due, progress = pickle.loads(content[num_bytes:].numpy().tobytes())
        return JoinMessage(due=due, progress=progress, agreed=agreed)

    def _report(self, before: Members) -> None:
        """Log which replicas have joined or left."""
        now, own = self.group.members, self.group.rounds.own.name
        if self.group.rounds.rank or before == now:
            return
        if before.place(own) is None:
            others = now.without([own])
            log.info(f"joined {others} as node {self.group.number}: {len(now.nodes)} go on")
            return
        ended, came = before.without(now.names), now.without(before.names)
        if ended.nodes:
            log.warning(
                f"{ended} ended, {len(now.nodes)} go on: {now}. The global batch has lost their "
                "share, and their parts of the outer momentum start at zero"
            )
        if came.nodes:
            log.info(f"{came} joined, {len(now.nodes)} go on: {now}")
