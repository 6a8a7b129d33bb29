"""What one rank of an emulated cluster does, as `RankProcesses.ask` orders through a pipe."""

import gc
import socket
import time
from collections.abc import Mapping

import torch

from benchmarks.cluster.bf16_matmul import multiply_in_fp32
from benchmarks.cluster.configurations import Configuration, build_configuration
from benchmarks.shared.training_setup import TrainingSetup, joined_ranks
from megatron_zpp.parallel.mesh import Ranks

PROBE_PORT = 29400
CHUNK = 2**20  # bytes


class ClusterRank:
    """The orders of a rank, and what it keeps between them."""

    def __init__(self) -> None:
        self.ranks: Ranks | None = None
        self.configurations: dict[str, Configuration] = {}
        self.bf16_kernels: torch.library.Library | None = None

    def join(self, products: str) -> dict:
        """Join the process group; bf16 matrices are multiplied in `products`, bf16 or fp32."""
        if products == "fp32":
            self.bf16_kernels = multiply_in_fp32()
        self.ranks = joined_ranks()
        return {}

    def build(self, name: str, shape: Mapping[str, int], flags: str) -> dict:
        """Build a configuration beside the others; `zeropp 2` is a second one of `zeropp`."""
        setup = TrainingSetup(shape=shape, ranks=self.ranks, dtype="bf16", extra_flags=flags)
        ranks_per_node = self.ranks.environment.local_world_size
        configuration = build_configuration(name.split()[0], setup, ranks_per_node)
        self.configurations[name] = configuration
        gc.collect()
        gc.freeze()  # the models are never garbage, so no step should spend time on them
        names = ("parameters", "expected", "held")
        return {name: getattr(configuration, name) for name in names}

    def run(self, name: str, part: str) -> dict:
        """Run a configuration's `part`: "step", one of training, or "forward", without gradients.

        Returns loss, seconds, processor seconds of all threads, and bytes by the traffic ledger.
        """
        configuration = self.configurations[name]
        run = {"step": configuration.step, "forward": configuration.forward}[part]
        configuration.take_sent()
        wall, processor = time.perf_counter(), time.process_time()
        loss = run()
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        return {
            "seconds": wall,
            "processor_seconds": processor,
            "loss": loss,
            "sent": configuration.take_sent(),
        }

    def probe(self, sender: int, receiver: int, address: str, num_bytes: int) -> dict:
        """The receiver's answer is the rate of one connection between two ranks, in bit/s."""
        if self.ranks.rank == sender:
            _send(address, num_bytes)
        if self.ranks.rank == receiver:
            return {"rate": _receive(address, num_bytes)}
        return {}


def _receive(address: str, num_bytes: int) -> float:
    """The rate from the first byte to the last, in bit/s."""
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
