"""Replicas that are killed and that join at random, as threads connected by gloo.

Set RANDOM_ELASTIC to draw more runs than the suite does.
"""

import itertools
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.mortal_nodes import Killed, Lives
from zeropp.capabilities.local_sgd.elastic_group import ElasticGroup
from zeropp.capabilities.local_sgd.elastic_steps import ElasticSteps
from zeropp.capabilities.local_sgd.fragment import OuterOptions
from zeropp.capabilities.local_sgd.rounds import Member, Members, NobodyLeftError, Rounds
from zeropp.capabilities.local_sgd.sync_schedule import SyncSchedule
from zeropp.capabilities.local_sgd.trained_weights import OfModule, TrainedWeights
from zeropp.errors import InputError

RUNS = int(os.environ.get("RANDOM_ELASTIC", "6"))
LIMIT = timedelta(seconds=30)
LAST = 12  # step
FINISHED = "finished"


class Steps:
    """The progress of a node: how many steps it has taken."""

    def __init__(self) -> None:
        self.count = 0

    def state(self) -> int:
        return self.count

    def load(self, state: int) -> None:
        self.count = state


class Mortal(Rounds):
    """Rounds of a node that may be killed where it looks at the store."""

    def require_going(self) -> None:
        self._die()
        super().require_going()

    def arrive(self, *, admits: bool) -> Members:
        self._die()
        return super().arrive(admits=admits)

    def conclude(self, *, succeeded: bool) -> bool:
        self._die()
        return super().conclude(succeeded=succeeded)

    def _die(self) -> None:
        if not self._lives.is_alive(self.own.name):
            raise Killed


class Run:
    """Nodes with a small model each, and what they had after every exchange."""

    def __init__(self, seed: int, schedule: SyncSchedule, options: OuterOptions) -> None:
        self.draw, self.store, self.lives = random.Random(seed), dist.HashStore(), Lives()
        self.schedule, self.options = schedule, options
        self.agreed: dict[tuple[str, int], bytes] = {}
        self.sums: dict[tuple[str, int], list[float]] = {}
        self.ends: dict[str, str] = {}
        self.pool, self.results = ThreadPoolExecutor(16), []

    def start(self, own: Member, members: Members) -> None:
        """Start a node, which begins with `members` or joins."""
        model = small_model(own.number if own.is_fresh else 0)
        self.results.append(self.pool.submit(self._node, own, members, model))

    def _node(self, own: Member, members: Members, model: nn.Module) -> None:
        rounds = Mortal(self.store, own, 0, 1, self.lives, LIMIT.total_seconds())
        if not own.is_fresh:
            rounds.begin(members)
        end = FINISHED
        try:
            self._train(own, ElasticGroup(self.store, rounds, 2, LIMIT), model)
        except Killed:
            end = "killed"
        finally:
            self.lives.end(own.name)
        self.ends[own.name] = end

    def _train(self, own: Member, group: ElasticGroup, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(own.number)
        progress = Steps()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weights = TrainedWeights(model=OfModule(model, None), optimizer=optimizer)
        steps = ElasticSteps(
            weights=weights,
            group=group,
            schedule=self.schedule,
            options=self.options,
        )
        steps.follow(progress)
        if own.is_fresh:
            steps.join()
            self._count_nodes(own, steps, progress.count)
        while progress.count < LAST:
            progress.count += 1
            for each in model.parameters():
                each.grad = torch.randn(each.shape, generator=generator)
            model.moved += torch.randn(3, generator=generator)
            steps.before_update(progress.count)
            optimizer.step()
            steps.after_update(progress.count, is_last=progress.count == LAST)
            agreed = [each for part in steps.fragments for each in part.agreed]
            agreed += steps.buffers.agreed.values()
            if steps.has_peers:
                agreed += [*model.parameters(), *model.buffers()]
            self.agreed[own.name, progress.count] = b"".join(
                each.detach().numpy().tobytes() for each in agreed
            )
            self._count_nodes(own, steps, progress.count)
            time.sleep(0.002)

    def _count_nodes(self, own: Member, steps: ElasticSteps, step: int) -> None:
        """Sum something where nodes are alike: their number, and that of their shares."""
        if steps.has_peers:
            self.sums[own.name, step] = steps.sum(lambda place, size: (1, 1 / size, place))


def small_model(seed: int) -> nn.Module:
    """Return a model of several thousand weights, and a buffer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 30))
    model.register_buffer("moved", torch.full((3,), float(seed)))
    return model


@pytest.mark.parametrize("seed", range(RUNS))
def test_replicas_that_are_left_are_equal_to_the_bit(seed: int) -> None:
    draw = random.Random(seed)
    every = draw.choice([2, 3, ((0, 1), (4, 2))])
    schedule = SyncSchedule.of(every, fragments=draw.choice([1, 2]))
    run = Run(seed, schedule, OuterOptions(bits=draw.choice([2, 4, 8, 32])))
    nodes = [Member(name=f"n{number}", number=number) for number in range(draw.randint(1, 3))]
    run.store.set("members/0", Members(tuple(nodes)).text)
    run.start(Member(name="j0", number=10, is_fresh=True), Members(()))
    for node in nodes:
        run.start(node, Members(tuple(nodes)))
    for event in range(draw.randint(0, 3)):
        time.sleep(draw.random() * 0.2)
        alive = [node.name for node in nodes if run.lives.is_alive(node.name)]
        if draw.random() < 0.5 and len(alive) > 1:
            run.lives.end(draw.choice(alive))
        elif event:
            run.start(Member(name=f"j{event}", number=10 + event, is_fresh=True), Members(()))
    for result in run.results:
        if (error := result.exception(60)) is not None:
            assert isinstance(error, NobodyLeftError)
    for step in range(1, LAST + 1):
        values = {content for (_, number), content in run.agreed.items() if number == step}
        assert len(values) == 1
        sums = {tuple(each) for (_, number), each in run.sums.items() if number == step}
        assert len(sums) <= 1
        for size, shares, places in sums:
            assert shares == pytest.approx(1) and places == size * (size - 1) / 2
    assert any(step == LAST for _, step in run.sums)
    assert FINISHED in run.ends.values()


class Begun:
    """Nodes that have begun, whose ranks are threads."""

    def __init__(self, num_nodes: int, num_ranks: int = 1) -> None:
        self.store, self.lives, self.num_ranks = dist.HashStore(), Lives(), num_ranks
        nodes = (Member(name=f"n{number}", number=number) for number in range(num_nodes))
        self.members = Members(tuple(nodes))
        self.store.set("members/0", self.members.text)

    def steps(
        self, node: Member, model: nn.Module, rank: int = 0, fragments: int = 1, bits: int = 4
    ) -> ElasticSteps:
        rounds = Rounds(self.store, node, rank, self.num_ranks, self.lives, LIMIT.total_seconds())
        rounds.begin(self.members)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return ElasticSteps(
            weights=TrainedWeights(model=OfModule(model, None), optimizer=optimizer),
            group=ElasticGroup(self.store, rounds, len(self.members.nodes), LIMIT),
            schedule=SyncSchedule.of(2, fragments=fragments),
            options=OuterOptions(bits=bits),
        )

    def run(self, train: Callable) -> list[Future]:
        """Call `train` for each rank of each node, and wait for all."""
        with ThreadPoolExecutor(16) as pool:
            ranks = itertools.product(self.members.nodes, range(self.num_ranks))
            return [pool.submit(train, *rank) for rank in ranks]


def test_what_was_not_sent_yet_goes_to_those_who_own_it_after_a_node_ended() -> None:
    """With two bits: each sender keeps what rounding lost of the elements that others own."""
    begun = Begun(3)

    def train(node: Member, _: int) -> None:
        model = small_model(0)
        steps = begun.steps(node, model, bits=2)
        generator = torch.Generator().manual_seed(node.number)
        with torch.no_grad():
            for each in model.parameters():
                each += torch.randn(each.shape, generator=generator)
        steps.after_update(2)
        (fragment,) = steps.fragments
        before = fragment.mean.joined(fragment.mean.unsent)
        if node.number == 2:
            begun.lives.end(node.name)
            return
        assert steps.sum(lambda place, size: [1.0]) == [2.0]
        after = fragment.mean.joined(fragment.mean.unsent)
        own = fragment.mean.joined(
            [
                torch.full_like(each, place == node.number)
                for place, each in enumerate(fragment.mean.unsent)
            ]
        )
        for old, new, is_own in zip(before, after, own, strict=True):
            assert torch.equal(new, old.where(is_own == 0, 0.0))
        assert sum(each.abs().sum() for each in after) > 0

    for result in begun.run(train):
        result.result()


def test_ranks_of_a_node_come_to_the_same_rounds() -> None:
    """The second rank of each node, as of a pipeline, has no weights in the first fragment."""
    begun = Begun(2, num_ranks=2)

    def train(node: Member, rank: int) -> list[tuple[int, bool]]:
        model, seen = nn.Linear(3, 3, bias=rank == 0), []
        steps = begun.steps(node, model, rank, fragments=2)
        for step in range(1, 6):
            steps.after_update(step, is_last=step == 5)
            seen.append((steps.group.rounds.number, steps.is_alike))
        return seen

    first, *others = (each.result() for each in begun.run(train))
    assert first == [(2, False), (3, False), (4, False), (5, False), (6, True)]
    assert all(each == first for each in others)


def test_a_node_whose_weights_are_not_finite_leaves_the_others() -> None:
    begun = Begun(2)

    def train(node: Member, _: int) -> nn.Module:
        model = small_model(0)
        if node.number:
            nn.init.constant_(model[1].bias, torch.nan)
        try:
            begun.steps(node, model).after_update(2)
        finally:
            begun.lives.end(node.name)
        return model

    good, bad = begun.run(train)
    with pytest.raises(InputError, match="weights of this node are not finite"):
        bad.result()
    assert all(each.isfinite().all() for each in good.result().parameters())
