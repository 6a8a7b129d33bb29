"""The GPUs, nodes and links that a step is timed on: from `hardware.toml`, or described by hand.

A `Cluster` has ranges where constants are uncertain; `Cluster.at` picks one value of each, the
`Rates` that times are computed with.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from megatron_zpp.monitor.matmul_rate import peak_of
from zeropp.errors import InputError
from zeropp.settings import read_toml

SLOW, TYPICAL, FAST = "slow", "typical", "fast"
GBIT, GB, GIB, TERA = 1e9 / 8, 1e9, 2**30, 1e12  # bytes per second, bytes, bytes, FLOP/s
BY_HAND: Mapping[str, tuple[str, Callable[[float], float]]] = MappingProxyType(
    {  # the field of a `Gpu`, from the user's unit
        "gpu_tflops": ("tflops", float),
        "gpu_bandwidth": ("memory_rate", lambda tera: tera * 1000 * GB),
        "gpu_memory": ("memory_bytes", lambda gib: round(gib * GIB)),
        "node_bandwidth": ("near_rate", lambda giga: giga * GB),
    }
)
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([mg])bit(?:/s)?", re.IGNORECASE)


@dataclass(frozen=True)
class Range:
    """A constant that is not known exactly."""

    slow: float
    typical: float
    fast: float

    def at(self, level: str) -> float:
        return getattr(self, level)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU; bytes, bytes per second, and shares of its peak rate of products.

    `sending_share` is the share of its multiprocessors that collectives run on beside products.
    `tflops` is the peak rate of a GPU that is described by hand, else None.
    """

    name: str
    cuda_name: str
    memory_bytes: int
    memory_rate: float
    near_rate: float
    product_share: Range
    half_width: float
    sending_share: float
    tflops: float | None = None

    def peak(self, dtype: torch.dtype) -> float:
        """Return FLOP/s of dense products; raises InputError for a format that it cannot do."""
        if self.tflops is not None:
            return self.tflops * TERA
        peak = peak_of(self.cuda_name, dtype)
        if peak is None:
            raise InputError(
                f"{self.name} has no matrix products in {str(dtype).removeprefix('torch.')}: "
                "plan with --fp16"
            )
        return peak


@dataclass(frozen=True)
class Protocol:
    """How NCCL sends: seconds to start, for each hop near and far, and the share of the rate."""

    start: float
    near: float
    far: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What times are computed with: FLOP/s, and bytes per second that are reached.

    `far` is of a node's links to other nodes, in each direction, `near` what a rank sends to the
    others of its node. `sending_share` of the processor computes nothing while messages are sent.
    """

    products: float
    half_width: float
    memory: float
    near: float
    far: float
    protocols: tuple[Protocol, ...]
    sending_share: float = 0.0

    def products_at(self, width: int) -> float:
        """Return FLOP/s of products of a model of this hidden size."""
        return self.products / (1 + self.half_width / width)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal GPUs; `link_rate` is the line rate of a node's links, bytes per second.

    `basis` says what the constants rest on.
    """

    name: str
    gpu: Gpu
    num_nodes: int
    gpus_per_node: int
    link_rate: float
    link_share: Range
    protocols: tuple[Protocol, ...] = field(repr=False)
    reserved_bytes: int
    basis: str = "table only: nothing was measured on this hardware"

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def usable_bytes(self) -> int:
        """Bytes of a GPU's memory for tensors."""
        return self.gpu.memory_bytes - self.reserved_bytes

    def at(self, level: str, dtype: torch.dtype) -> Rates:
        """Return the rates at the slow, typical or fast end of all ranges."""
        return Rates(
            products=self.gpu.peak(dtype) * self.gpu.product_share.at(level),
            half_width=self.gpu.half_width,
            memory=hardware_table()["kernels"]["memory_share"] * self.gpu.memory_rate,
            near=self.gpu.near_rate,
            far=self.far_rate(level),
            protocols=self.protocols,
            sending_share=self.gpu.sending_share,
        )

    def far_rate(self, level: str) -> float:
        """Return what a node's links to other nodes reach, bytes per second."""
        return self.link_rate * self.link_share.at(level)

    def with_link(self, gbit: float) -> "Cluster":
        """Return the same cluster with links of another rate."""
        return replace(self, link_rate=gbit * GBIT)


def find_cluster(
    *,
    cluster: str | None = None,
    num_nodes: int = 1,
    gpus_per_node: int | None = None,
    link: str | None = None,
    gpu: str | None = None,
    **by_hand: float | None,
) -> Cluster:
    """Return the cluster that a user describes; what is None is the table's.

    by_hand: numbers of its GPUs, named as in `BY_HAND`. Raises InputError for an unknown cluster or
    GPU, naming the nearest, and for what is missing.
    """
    table = hardware_table()
    preset: Mapping[str, Any] = {}
    if cluster is not None:
        preset = _entry(table["clusters"], cluster, "--cluster")
    gpus_per_node = gpus_per_node or preset.get("gpus_per_node")
    if gpus_per_node is None:
        raise InputError(
            "give --cluster, one of " + ", ".join(table["clusters"]) + ", or describe it: "
            "--gpus-per-node N, --link RATE as in 25gbit, and --gpu NAME"
        )
    link_rate = preset.get("link_gbit", 0) * GBIT if link is None else parse_rate(link, "--link")
    if not link_rate and num_nodes > 1:
        raise InputError("give --link RATE, that of a node to the others, as in 25gbit")
    given = {name: value for name, value in by_hand.items() if value is not None}
    return Cluster(
        name=cluster or "by hand",
        gpu=_gpu(gpu or preset.get("gpu"), given),
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        link_rate=link_rate,
        link_share=Range(*table["links"]["share"]),
        protocols=_protocols(table["protocols"]),
        reserved_bytes=round(table["memory"]["reserved_gib"] * GIB),
    )


@cache
def hardware_table() -> Mapping[str, Any]:
    """Return the contents of `hardware.toml`."""
    return read_toml(__package__, "hardware.toml")


def table_gpu(name: str) -> Gpu:
    """Return a GPU of the table; raises InputError for an unknown one, naming the nearest."""
    return _gpu_of(name, _entry(hardware_table()["gpus"], name, "--gpu"))


def _gpu_of(name: str, entry: Mapping[str, Any]) -> Gpu:
    return Gpu(
        name=name,
        cuda_name=entry["cuda_name"],
        memory_bytes=round(entry["memory_gib"] * GIB),
        memory_rate=entry["memory_gb_s"] * GB,
        near_rate=entry["near_gb_s"] * GB,
        product_share=Range(*entry["product_share"]),
        half_width=entry["half_width"],
        sending_share=entry["channels"] / entry["multiprocessors"],
    )


def parse_rate(text: str, name: str) -> float:
    """Return bytes per second of a link rate as 25gbit or 400mbit; raises InputError for others."""
    match = _RATE.fullmatch(text.strip())
    rate = float(match[1]) if match else 0.0
    if not rate:
        raise InputError(f"{name} {text}: expected a rate above 0, as 25gbit or 400mbit")
    return rate * GBIT / (1000 if match[2].lower() == "m" else 1)


def _gpu(name: str | None, by_hand: Mapping[str, float]) -> Gpu:
    """Return a GPU of the table, or one of no name, with the numbers that the user gives."""
    needed = [each for each in BY_HAND if each != "node_bandwidth"]
    missing = [f"--{each.replace('_', '-')}" for each in needed if each not in by_hand]
    if name is not None:
        gpu = table_gpu(name)
    elif missing:
        names = ", ".join(hardware_table()["gpus"])
        raise InputError(
            f"give --gpu, one of {names}, or describe it: {' and '.join(missing)} missing"
        )
    else:
        gpu = _gpu_of("by hand", hardware_table()["by_hand"])
    fields = {BY_HAND[each][0]: BY_HAND[each][1](value) for each, value in by_hand.items()}
    return replace(gpu, **fields)


def _entry(table: Mapping[str, Any], name: str, flag: str) -> Mapping[str, Any]:
    if name not in table:
        close = [known for known in table if known.startswith(name.lower())]
        close = close or difflib.get_close_matches(name.lower(), table, n=1, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(table)}."
        raise InputError(
            f"{flag} {name}: unknown; {hint} Others are described by hand, by their numbers "
            "(docs/planning.md)"
        )
    return table[name]


def _protocols(table: Mapping[str, Mapping[str, float]]) -> tuple[Protocol, ...]:
    micro = 1e-6
    return tuple(
        Protocol(
            entry["start"] * micro, entry["near"] * micro, entry["far"] * micro, entry["share"]
        )
        for entry in table.values()
    )
