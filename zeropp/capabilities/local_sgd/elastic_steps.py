"""Nodes that step alone, and that come and go: an exchange is done by all who are left, or by none.

A node that joins gets the agreed weights of another one and begins with zeros for its difference,
which the mean does not count. Where other nodes take part than before, the outer momentum and what
was rounded away (error feedback) go to their new owners; those of nodes that ended start at zero.
With feedback a node keeps what it has not sent, apart from the elements that it owns itself now.
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
from zeropp.capabilities.local_sgd.member import Members
from zeropp.capabilities.local_sgd.outer_mean import OuterMean
from zeropp.ranks.coordination import gather_objects

DEALT_BITS = 8  # of a number on its way to a new owner, where fewer than 32 are sent
FP32_BYTES = 4

log = logging.getLogger("zeropp")


class Progress(Protocol):
    """What a node that joins gets beside the weights: how far the others are."""

    def state(self) -> Any: ...

    def load(self, state: Any) -> None: ...


@dataclass
class Draft:
    """What a fragment will be after a round, if all do it."""

    fragment: Fragment
    mean: OuterMean
    momentum: Tensor
    values: Sequence[Tensor] = ()

    def run(self, tensors: Sequence[Tensor], num_terms: int) -> None:
        """Form the outer step with the mean of tensors."""

        def nesterov(mean: Tensor) -> Tensor:
            self.momentum, step = self.fragment.options.nesterov(self.momentum, mean)
            return step

        self.values = self.mean.run(tensors, nesterov, num_terms)

    def keep(self) -> None:
        """Let the fragment be like this."""
        self.fragment.mean, self.fragment.momentum = self.mean, self.momentum


@dataclass(frozen=True, kw_only=True)
class News:
    """What a node that joins gets: the numbers of the fragments that are exchanged, and the rest.

    agreed: the weights of all fragments after the last exchange, flat fp32.
    """

    due: Sequence[int]
    progress: Any = None
    agreed: Mapping[int, Sequence[Tensor]]


@dataclass(kw_only=True)
class ElasticSteps(LocalSteps):
    """`LocalSteps` with nodes that come and go."""

    group: ElasticGroup
    progress: Progress | None = None

    def follow(self, progress: Progress) -> None:
        """Let nodes that join get this progress; to be called before the first exchange."""
        self.progress = progress

    def join(self) -> None:
        """Get weights and progress from the others in their next exchange, and take part in it."""
        gather_objects(None)  # the others wait for all ranks once this node is admitted
        self.group.join()
        self._exchange([], 0, 0)
        self.has_stepped_alone = True  # moments are those of this node

    @property
    def has_peers(self) -> bool:
        """Whether all who take part are at the same step, with the same weights as this node."""
        return self.is_alike and not self.group.joins

    def sum(self, values_of: Callable[[int, int], Sequence[float]]) -> list[float]:
        """Return sums over nodes of `values_of(place, number of nodes)`, the same on all of them.

        All ranks of all nodes that take part call it at the same step, those that join too. It is
        computed again with those who are left if a node ends.
        """

        def work(members: Members) -> tuple[list[Draft], list[float]]:
            group = self.group
            return self._drafts(members), group.sum(*values_of(group.node, group.size))

        before = self.group.members
        drafts, sums = self.group.hold(work)
        for draft in drafts:
            draft.keep()
        self._report(before)
        return sums

    def _average_gradients(self) -> None:
        own = [(each.weights.gradients(), each.weights.have_gradients()) for each in self.fragments]

        def work(members: Members) -> tuple[list[Draft], list[list[float]]]:
            drafts, counts = self._drafts(members), []
            for draft, (gradients, have_gradients) in zip(drafts, own, strict=True):
                draft.values = draft.mean.run(gradients)
                counts.append(self.group.sum(*have_gradients))
            return drafts, counts

        before = self.group.members
        for draft, counts in zip(*self._with_buffers(work), strict=True):
            draft.keep()
            draft.fragment.weights.write_gradients(draft.values, list(map(bool, counts)))
        self._report(before)

    @torch.no_grad()
    def _exchange(self, due: Sequence[int], step: int, delay: int) -> None:
        """Exchange the fragments that are due, and perhaps let nodes join.

        All ranks of a node come to the same rounds, those too that have no weights in a fragment.
        """
        if not due and not self.group.joins:
            return
        before = self.group.members  # a node that joins has taken no steps: zeros
        differences = {each.number: each.differences() for each in self.fragments}
        for each in differences.values():
            require_finite(each, each)

        def work(members: Members) -> tuple[list[Draft], News]:
            drafts, num_terms = self._drafts(members), len(members.with_weights)
            news = self._pass_on(members, due)
            for draft in drafts:
                number = draft.fragment.number
                if number in news.due:
                    draft.run(differences[number], num_terms)
            return drafts, news

        drafts, news = self._with_buffers(work, admits=True)
        for draft in drafts:
            self._keep(draft, news)
        self.is_alike = len(news.due) == self.schedule.fragments
        if news.progress is not None:
            self.progress.load(news.progress)
        self._report(before)

    def _keep(self, draft: Draft, news: News) -> None:
        draft.keep()
        fragment = draft.fragment
        if news.agreed:
            for agreed, each in zip(fragment.agreed, news.agreed[fragment.number], strict=True):
                agreed.copy_(each)
        if fragment.number in news.due:
            for agreed, update in zip(fragment.agreed, draft.values, strict=True):
                agreed -= update.to(agreed.device)
        if news.agreed or fragment.number in news.due:
            fragment.merge(0.0)

    def _with_buffers(self, work: Callable[[Members], Result], *, admits: bool = False) -> Result:
        """Return the result of `work` in a round; give all nodes the means of their buffers too."""

        def both(members: Members) -> tuple[Result, list[Tensor]]:
            result = work(members)
            own = [self.buffers.message()] * self.group.size
            messages = self.group.exchange(own) if self.buffers.agreed else own
            return result, [messages[place] for place in members.with_weights]

        result, messages = self.group.hold(both, admits=admits)
        self.buffers.take(messages)
        self.buffers.merge(0.0)
        return result

    def _drafts(self, members: Members) -> list[Draft]:
        """Return the fragments as they are for those who take part in a round."""
        if members.names == self.group.members.names:
            return [Draft(each, each.mean.copy(), each.momentum) for each in self.fragments]
        bits, drafts = self.options.bits, []
        for each in self.fragments:
            old, device = each.mean, each.momentum.device
            mean = self.options.mean(old.sizes, self.group, device)
            carrier = OuterMean(old.sizes, self.group, max(bits, DEALT_BITS), device)
            mean.take_unsent(old)
            mean.error = carrier.sum(old.spread(old.error))
            drafts.append(Draft(each, mean, carrier.sum(old.spread(each.momentum))))
        return drafts

    def _pass_on(self, members: Members, due: Sequence[int]) -> News:
        """Send the agreed weights and the progress to those who join; return what has come."""
        group = self.group
        if not any(each.is_fresh for each in members.nodes):
            return News(due=due, agreed={})
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
            return News(due=due, agreed={})
        sizes = [size for each in self.fragments for size in each.mean.sizes]
        num_bytes = FP32_BYTES * sum(sizes)
        parts = iter(content[:num_bytes].clone().view(torch.float32).split(sizes))
        agreed = {each.number: [next(parts) for _ in each.agreed] for each in self.fragments}
        due, progress = pickle.loads(content[num_bytes:].numpy().tobytes())
        return News(due=due, progress=progress, agreed=agreed)

    def _report(self, before: Members) -> None:
        """Log who has come and who has ended."""
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
