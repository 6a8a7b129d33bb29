"""Nodes that are killed and that join at random, as threads that share a store.

Set RANDOM_ROUNDS to draw more runs than the suite does.
"""

import json
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch.distributed as dist

from tests.mortal_nodes import Killed, Lives
from zeropp.capabilities.local_sgd.rounds import (
    ExcludedError,
    Member,
    Members,
    NobodyLeftError,
    NodeLostError,
    Rounds,
)

RUNS = int(os.environ.get("RANDOM_ROUNDS", "12"))
RANKS, ROUNDS, SECONDS = 2, 6, 10.0
FINISHED = "finished"


class MortalStore:
    """A store of a rank that may be killed before any request."""

    def __init__(self, store: dist.Store, name: str, lives: Lives, draw: random.Random) -> None:
        self._store, self._name, self._lives, self._draw = store, name, lives, draw

    def __getattr__(self, method: str) -> Callable:
        if self._name in self._lives.ended:
            raise Killed
        if self._draw.random() < 0.05:
            time.sleep(0.0005)
        return getattr(self._store, method)


class Run:
    """A run of nodes that take ROUNDS steps together, and what each rank has after each step.

    A step's value depends on all before it, and on who took part.
    """

    def __init__(self, seed: int) -> None:
        self.draw, self.store, self.lives = random.Random(seed), dist.HashStore(), Lives()
        self.steps: dict[tuple[str, int], dict[int, str]] = {}
        self.ends: dict[tuple[str, int], str] = {}
        self.pool, self.results = ThreadPoolExecutor(64), []

    def start(self, member: Member, members: Members) -> None:
        """Start the ranks of a node, which begins with `members` or joins."""
        together = threading.Barrier(RANKS)
        for rank in range(RANKS):
            place = (member, members, rank, together, self.draw.random())
            self.results.append(self.pool.submit(self._rank, *place))

    def _rank(
        self, own: Member, members: Members, rank: int, together: threading.Barrier, seed: float
    ) -> None:
        store = MortalStore(self.store, own.name, self.lives, random.Random(seed))
        rounds = Rounds(store, own, rank, RANKS, self.lives, SECONDS)
        try:
            if own.is_fresh:
                together.wait()
                if rank == 0:
                    rounds.announce()
                rounds.wait_for_admission()
            else:
                rounds.begin(members)
            self._step(rounds, store, random.Random(seed), 0, "")
            end = FINISHED
        except (Killed, ExcludedError, NobodyLeftError) as error:
            end = type(error).__name__
        self.ends[own.name, rank] = end
        # A launcher ends the other ranks of a node when one has failed.
        if end != FINISHED or all((own.name, each) in self.ends for each in range(RANKS)):
            self.lives.end(own.name)

    def _step(
        self, rounds: Rounds, store: MortalStore, draw: random.Random, step: int, value: str
    ) -> None:
        done = self.steps.setdefault((rounds.own.name, rounds.rank), {})
        while step < ROUNDS:
            members, got = rounds.arrive(admits=True), None
            if draw.random() < 0.95:  # as if a connection broke
                with suppress(NodeLostError):
                    got = self._exchange(rounds, store, members, [step, value])
            if rounds.conclude(succeeded=got is not None):
                step, value = got[0] + 1, f"{hash((got[1], members.names))}"
                done[step] = value

    def _exchange(
        self, rounds: Rounds, store: MortalStore, members: Members, own: list
    ) -> tuple[int, str]:
        """Return what those with weights have, who all have the same, as in a collective."""
        senders = [members.nodes[place].name for place in members.with_weights]
        keys = [f"sent/{rounds.number}/{name}/{rounds.rank}" for name in senders]
        if rounds.own.name in senders:
            store.set(f"sent/{rounds.number}/{rounds.own.name}/{rounds.rank}", json.dumps(own))
        rounds.wait(lambda: store.check(keys))
        (content,) = {store.get(key) for key in keys}
        return json.loads(content)


@pytest.mark.parametrize("seed", range(RUNS))
def test_all_who_are_left_agree_whatever_happens(seed: int) -> None:
    """A round is done for all its members or for none, and nobody waits forever."""
    run = Run(seed)
    draw = run.draw
    nodes = [Member(name=f"n{number}", number=number) for number in range(draw.randint(1, 4))]
    run.store.set("members/0", Members(tuple(nodes)).text)
    for node in nodes:
        run.start(node, Members(tuple(nodes)))
    living = list(nodes)
    for event in range(draw.randint(0, 6)):
        time.sleep(draw.random() * 0.01)
        if draw.random() < 0.5 and len(living) > 1:
            ended = living.pop(draw.randrange(len(living))).name
            run.lives.end(ended)
        else:
            joins = Member(name=f"j{event}", number=10 + event, is_fresh=True)
            run.start(joins, Members(()))
            living.append(joins)
    for result in run.results:
        result.result(SECONDS)
    values: dict[int, set[str]] = {}
    for steps in run.steps.values():
        for step, value in steps.items():
            values.setdefault(step, set()).add(value)
    assert all(len(each) == 1 for each in values.values())
    for place, steps in run.steps.items():
        if run.ends[place] == FINISHED:
            assert [*steps] == [*range(min(steps), ROUNDS + 1)]  # it left out no step
    names = {node.name for node in living if not node.is_fresh}
    assert {run.ends[name, rank] for name in names for rank in range(RANKS)} <= {FINISHED}


def test_who_has_asked_to_join_takes_part_in_the_next_round_that_admits() -> None:
    first, second = Member(name="n0", number=0), Member(name="j1", number=1, is_fresh=True)
    store = dist.HashStore()
    going, joining = (Rounds(store, own, 0, 1, Lives(), SECONDS) for own in (first, second))
    going.begin(Members((first,)))
    joining.announce()
    assert going.arrive(admits=False).nodes == (first,) and going.conclude(succeeded=True)
    assert going.arrive(admits=True).nodes == (first, second)
    joining.wait_for_admission()
    assert joining.arrive(admits=True).nodes == (first, second)
