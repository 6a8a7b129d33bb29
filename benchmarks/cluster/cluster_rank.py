"""One rank of an emulated cluster: does what `benchmarks/cluster/crew.py` orders through a pipe."""

import gc
import socket
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.cluster.products import multiply_in_fp32  # noqa: E402
from benchmarks.cluster.trainees import Trainee, trainee  # noqa: E402
from benchmarks.shared.setting import Setting  # noqa: E402
from megatron_zpp.parallel.mesh import Ranks, join_ranks  # noqa: E402
from megatron_zpp.settings.config import ParallelConfig  # noqa: E402
from zeropp.errors import InputError  # noqa: E402
from zeropp.ranks.topology import Environment  # noqa: E402

PROBE_PORT = 29400
CHUNK = 2**20  # bytes


class Rank:
    """What this rank holds between orders: its place and the configurations built so far."""

    def __init__(self) -> None:
        self.ranks: Ranks | None = None
        self.trainees: dict[str, Trainee] = {}
        self.products: torch.library.Library | None = None

    def join(self, products: str) -> dict:
        """Meet the others; `products` is what bf16 matrices are multiplied in."""
        if products == "fp32":
            self.products = multiply_in_fp32()
        self.ranks = join_ranks(Environment.read(), ParallelConfig())
        return {}

    def build(self, name: str, shape: tuple[tuple[str, int], ...]) -> dict:
        """Build a configuration beside those there are."""
        setting = Setting(shape=shape, ranks=self.ranks, dtype="bf16", stage=3)
        one = trainee(name, setting, self.ranks.environment.local_world_size)
        self.trainees[name] = one
        gc.collect()
        gc.freeze()  # the models are never garbage: no step pays for looking through them
        return {"parameters": one.parameters, "expected": one.expected, "held": one.held}

    def step(self, name: str) -> dict:
        """One step: its seconds and loss, and the bytes that the ledger says this rank sent.

        `work` is the seconds of processor time that all threads of this rank took.
        """
        one = self.trainees[name]
        one.take()
        started, idle = time.perf_counter(), time.process_time()
        loss = one.step()
        seconds, work = time.perf_counter() - started, time.process_time() - idle
        return {"seconds": seconds, "work": work, "loss": loss, "sent": one.take()}

    def look(self, name: str) -> dict:
        """One pass without gradients: its seconds and loss."""
        started = time.perf_counter()
        loss = self.trainees[name].look()
        return {"seconds": time.perf_counter() - started, "loss": loss}

    def probe(self, sender: int, receiver: int, address: str, num_bytes: int) -> dict:
        """Bits per second of one plain connection between two ranks; {} on all but the receiver."""
        rank = self.ranks.rank
        if rank == sender:
            _send(address, num_bytes)
        return {"rate": _receive(address, num_bytes)} if rank == receiver else {}


def main() -> None:
    """Answer orders until the other end of the pipe is gone."""
    connection = Connection(int(sys.argv[1]))
    rank = Rank()
    known = (rank.join, rank.build, rank.step, rank.look, rank.probe)
    orders: Mapping[str, Callable[..., dict]] = {one.__name__: one for one in known}
    while True:
        try:
            what, details = connection.recv()
        except EOFError:
            return
        try:
            answer = orders[what](**details)
        except InputError as refusal:
            answer = {"refused": str(refusal)}
        connection.send(answer)


def _receive(address: str, num_bytes: int) -> float:
    """The rate from the first byte to the last, in bits per second."""
    buffer = bytearray(CHUNK)
    with socket.create_server((address, PROBE_PORT)) as server:
        peer, _ = server.accept()
    with peer:
        left = num_bytes - peer.recv_into(buffer)
        counted, started = left, time.perf_counter()
        while left > 0:
            left -= peer.recv_into(buffer)
    return 8 * counted / (time.perf_counter() - started)


def _send(address: str, num_bytes: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            peer = socket.create_connection((address, PROBE_PORT))
            break
        except ConnectionRefusedError:  # the receiver does not listen yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    with peer:
        for first in range(0, num_bytes, CHUNK):
            peer.sendall(bytes(min(CHUNK, num_bytes - first)))


if __name__ == "__main__":
    main()
