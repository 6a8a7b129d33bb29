"""Nodes that come to a store: with whom they begin, which numbers they take, what is refused."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist

from zeropp.capabilities.local_sgd.entry import Entering, Entry, Saved
from zeropp.capabilities.local_sgd.rounds import DONE, ExcludedError, Rounds
from zeropp.errors import InputError, NetworkError

SECONDS = 20.0


class Verdicts:
    """Who lives, as all know at once."""

    def __init__(self) -> None:
        self.ended: set[str] = set()

    def verdict(self, name: str) -> bool:
        return name not in self.ended

    def is_alive(self, name: str) -> bool:
        return name not in self.ended


class Job:
    """Nodes that come to one store, on threads."""

    def __init__(self, num_nodes: int) -> None:
        self.store, self.verdicts, self.num_nodes = dist.HashStore(), Verdicts(), num_nodes
        self.pool = ThreadPoolExecutor(16)

    def come(
        self,
        name: str,
        checkpoints: Mapping[int, Saved] | None = None,
        limit: float = SECONDS,
        **settings: str,
    ) -> Future[Entry]:
        """Let a node come; `checkpoints` are the folder's by number."""
        entering = Entering(
            store=self.store,
            name=name,
            liveness=self.verdicts,
            num_nodes=self.num_nodes,
            settings=settings,
            advice="be like the others",
            saved_by=lambda number: (checkpoints or {}).get(number, Saved()),
            limit=limit,
        )
        return self.pool.submit(entering.enter)

    def begun(self, **checkpoints: Mapping[int, Saved]) -> list[Entry]:
        """Return how nodes have come, who are named with their checkpoints."""
        coming = [self.come(name, each) for name, each in checkpoints.items()]
        return [each.result(SECONDS) for each in coming]


def test_nodes_begin_together_with_numbers_of_their_own() -> None:
    entries = Job(3).begun(a={}, b={}, c={})
    assert sorted(each.own.number for each in entries) == [0, 1, 2]
    assert {each.members.text for each in entries} == {entries[0].members.text}
    assert [each.number for each in entries[0].members.nodes] == [0, 1, 2]
    assert not any(each.joins for each in entries)


def test_a_node_that_comes_later_joins_with_the_number_of_one_that_ended() -> None:
    job = Job(2)
    first = job.begun(a={}, b={})
    job.verdicts.ended.add("a")
    (entry,) = job.begun(c={0: Saved(7)})
    assert entry.joins and entry.iteration == 0
    assert entry.own.number == next(each.own.number for each in first if each.own.name == "a")


def test_only_the_furthest_checkpoints_begin() -> None:
    """Those that are behind get the weights of the others."""
    folder = {0: Saved(30, "x"), 1: Saved(20, "w"), 2: Saved(30, "x")}
    entries = Job(3).begun(a=folder, b=folder, c=folder)
    by_number = {each.own.number: each for each in entries}
    assert [by_number[number].joins for number in range(3)] == [False, True, False]
    assert [by_number[number].iteration for number in range(3)] == [30, 0, 30]


def test_nodes_take_the_numbers_of_their_checkpoints_where_each_has_a_disk_of_its_own() -> None:
    """In whatever order they come; on one disk for all, those of the newest checkpoints."""
    job, folder = Job(2), {0: Saved(10, "w"), 1: Saved(30, "x"), 2: Saved(30, "x")}
    coming = [job.come("b", {0: Saved(20, "w"), 1: Saved(30, "x")}), job.come("a", folder)]
    entries = [each.result(SECONDS) for each in coming]
    assert sorted(each.own.number for each in entries) == [1, 2]
    assert [each.iteration for each in entries] == [30, 30]


def test_nodes_begin_in_the_places_that_they_had() -> None:
    """As each has the outer momentum of the elements that it owned, by its place."""
    folder = {0: Saved(30, "x", place=1), 1: Saved(30, "x", place=0)}
    entries = Job(2).begun(a=folder, b=folder)
    assert [each.number for each in entries[0].members.nodes] == [1, 0]
    assert len({each.launch for each in entries}) == 1


def test_checkpoints_of_one_iteration_that_two_launches_have_saved_are_refused() -> None:
    folder = {0: Saved(30, "x"), 1: Saved(30, "w"), 2: Saved(30, "x")}
    job = Job(3)
    for coming in [job.come(name, folder) for name in "abc"]:
        with pytest.raises(InputError, match="the nodes 0, 1, 2 have checkpoints of iteration 30"):
            coming.result(SECONDS)


def test_a_new_run_begins_when_all_have_ended() -> None:
    job = Job(1)
    (first,) = job.begun(a={})
    job.verdicts.ended.add("a")
    (second,) = job.begun(b={0: Saved(40)})
    assert (first.epoch, second.epoch) == (0, 1) and first.launch != second.launch
    assert not second.joins and second.own.number == 0 and second.iteration == 40


def test_nodes_that_were_only_silent_do_not_go_on_beside_a_new_run() -> None:
    """All were taken for dead, as where they are stopped: who comes begins anew, and they end."""
    job = Job(1)
    (first,) = job.begun(a={})
    rounds = Rounds(dist.PrefixStore("0", job.store), first.own, 0, 1, job.verdicts, SECONDS)
    rounds.begin(first.members)
    assert rounds.arrive(admits=True) == first.members and rounds.conclude(succeeded=True)
    job.verdicts.ended.add("a")
    (second,) = job.begun(b={})
    job.verdicts.ended.clear()
    assert second.epoch == 1 and not second.joins
    with pytest.raises(ExcludedError, match="node 0 had not been heard of for so long that the ot"):
        rounds.arrive(admits=True)


def test_a_new_run_waits_for_nobody_who_is_in_a_round() -> None:
    """A node that was silent, and has begun the next round before anybody closed the run."""
    job = Job(1)
    (first,) = job.begun(a={})
    rounds = Rounds(dist.PrefixStore("0", job.store), first.own, 0, 1, job.verdicts, SECONDS)
    rounds.begin(first.members)
    rounds.arrive(admits=True)
    job.verdicts.ended.add("a")
    (second,) = job.begun(b={})
    assert second.epoch == 1
    assert rounds.conclude(succeeded=True)
    with pytest.raises(ExcludedError):
        rounds.arrive(admits=True)


def test_nodes_that_ended_before_the_run_began_are_not_waited_for() -> None:
    job = Job(2)
    lost = job.come("a")
    while not job.store.check(["0/candidate/0"]):
        threading.Event().wait(0.01)
    job.verdicts.ended.add("a")
    entries = job.begun(b={}, c={})
    assert not any(each.joins for each in entries)
    assert {each.epoch for each in entries} == {1}
    assert lost.result(SECONDS).joins  # had it only been silent, it would join


def test_who_has_weights_is_who_has_done_a_round() -> None:
    """A run whose last round was done by a node that had joined goes on without the first one."""
    job = Job(1)
    (first,) = job.begun(a={})
    joining = first.members.text.replace('"a"', '"b"').replace("false", "true")
    store = dist.PrefixStore("0", job.store)
    store.set("members/1", f"{first.members.text[:-1]}, {joining[1:]}")
    store.set("outcome/1", DONE.decode())
    job.verdicts.ended.add("a")
    (entry,) = job.begun(c={0: Saved(9)})
    assert entry.joins and entry.epoch == 0


def test_other_settings_are_named() -> None:
    job = Job(1)
    job.come("a", lr="1e-3", seed="1").result(SECONDS)
    with pytest.raises(InputError, match="lr is 2e-3 on this node and 1e-3 on the first one: be"):
        job.come("b", lr="2e-3", seed="1").result(SECONDS)


def test_nodes_that_do_not_come_are_counted() -> None:
    with pytest.raises(NetworkError, match="1 of zeropp.sync_nodes 3 nodes have come within"):
        Job(3).come("a", limit=0.2).result(SECONDS)
