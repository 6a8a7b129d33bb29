"""The ranks of one index in all replicas, each of which is its own process group world.

The default process group is not used, so that a replica may end while others go on. Messages are
on the host, sent by gloo.
"""

import pickle
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.capabilities.local_sgd.rounds import NodeLostError
from zeropp.errors import InputError
from zeropp.ranks.groups import WaitError
from zeropp.ranks.topology import Environment
from zeropp.wire.traffic import Traffic

PURPOSE = "outer"  # in the ledger
Result = TypeVar("Result")


class OuterError(WaitError):
    """An exchange with the other replicas failed."""


def join_outer_group(
    store: dist.Store, environment: Environment, world: Environment, timeout: timedelta
) -> "OuterGroup":
    """Connect this rank with those of its index in the other replicas.

    Raises InputError if there is only one replica.
    """
    size = environment.world_size // world.world_size
    if size == 1:
        raise InputError(
            f"zeropp.sync_every trains replicas independently, and there is only one, of "
            f"{world.world_size} ranks: start several (zeropp.ranks_per_node can cut a machine "
            "into nodes), or leave it out"
        )
    store = dist.PrefixStore(f"outer/{world.rank}", store)
    group = OuterGroup(store, environment.rank // world.world_size, size, timeout)
    group.launch = group.gather(uuid.uuid4().hex)[0]
    return group


class OuterGroup:
    """This rank's group; `node` is the index of its replica, of `size` replicas.

    number: names this replica's folders. planned: how many replicas the global batch is for.
    launch: identifies the replicas that were started together.

    All members call the same methods in the same order. What `start` starts runs on a thread, over
    connections of its own.
    """

    _watch: Callable[[Callable[[], bool]], None] | None = None  # waits; raises NodeLostError

    def __init__(self, store: dist.Store, node: int, size: int, timeout: timedelta) -> None:
        self.number, self.planned, self.launch = node, size, ""
        self.traffic = Traffic((PURPOSE,))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outer")
        self._connect(store, node, size, timeout)

    def _connect(self, store: dist.Store, node: int, size: int, timeout: timedelta) -> None:
        def connected(name: str) -> dist.ProcessGroupGloo:
            return dist.ProcessGroupGloo(dist.PrefixStore(name, store), node, size, timeout)

        self._messages, self._numbers = connected("messages"), connected("numbers")
        self.node, self.size = node, size
        self._last: dist.Work | None = None

    def start(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work`, which may call `exchange`, on the thread, after what was started before."""
        return self._thread.submit(work)

    def exchange(self, messages: Sequence[Tensor], content: int = 0) -> list[Tensor]:
        """Send `messages[i]`, uint8 of any length, to replica i; return what each one sent.

        The own message is returned as it is. To be called in `start`. Raises InputError if another
        replica has another `content`, a number that identifies what messages contain.
        """
        if self.size == 1:
            return list(messages)
        lengths = torch.tensor([(len(each), content) for each in messages])
        lengths[self.node, 0] = 0
        coming = torch.empty_like(lengths)
        self._all_to_all(coming, lengths, [1] * self.size, [1] * self.size)
        sizes, rooms = lengths[:, 0].tolist(), coming[:, 0].tolist()
        tags = coming[:, 1].tolist()
        if differing := [node for node, each in enumerate(tags) if each != content]:
            raise InputError(
                f"nodes {self.node} and {differing[0]} exchange other parameters, other values or "
                "after other steps: begin with the same weights, of one seed or the same files, "
                "take as many steps, and add or unfreeze parameters between the same exchanges"
            )
        sent = [each for node, each in enumerate(messages) if node != self.node]
        received = torch.empty(sum(rooms), dtype=torch.uint8)
        self._all_to_all(received, torch.cat(sent), rooms, sizes)
        self.traffic.add(PURPOSE, {"across_nodes": sum(sizes)})
        parts = list(received.split(rooms))
        parts[self.node] = messages[self.node]
        return parts

    def gather(self, value: Result) -> list[Result]:
        """Return the values of all replicas, in their order. Values are pickled."""
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._gathered(torch.tensor([len(own)]))
        room = max(each.item() for each in sizes)
        padded = torch.cat((own, own.new_zeros(room - len(own))))
        parts = zip(self._gathered(padded), sizes, strict=True)
        return [pickle.loads(part[: size.item()].numpy().tobytes()) for part, size in parts]

    def sum(self, *values: float) -> list[float]:
        """Return each value summed over replicas in fp64, the same to the bit on all of them."""
        return (
            torch.stack(self._gathered(torch.tensor(values, dtype=torch.float64))).sum(0).tolist()
        )

    def close(self) -> None:
        """End the thread, after what was started, when all members have called it."""
        self._thread.shutdown()
        with suppress(OuterError):  # another one has ended already
            self.sum(0.0)

    def _gathered(self, own: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._wait(partial(self._numbers.allgather, [parts], [own]))
        return parts

    def _all_to_all(
        self, received: Tensor, sent: Tensor, rooms: list[int], sizes: list[int]
    ) -> None:
        self._wait(partial(self._messages.alltoall_base, received, sent, rooms, sizes))

    def _wait(self, start: Callable[[], dist.Work]) -> None:
        try:
            self._last = work = start()
            if self._watch is not None:
                self._watch(work.is_completed)
            work.wait()
        except NodeLostError as error:
            raise OuterError(str(error)) from error
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0]
            raise OuterError(
                f"node {self.node} has lost another of the {self.size} replicas, "
                f"whose log says why: {reason}"
            ) from error
