"""The memory that frozen weights take on a rank, as zeropp counts it and as the system does.

Each rank holds its shards of some square matrices: first loaded one by one into INT8, then in bf16,
then these converted to INT8. Resident memory and its peak are what the system counts for the
process. All numbers are those of rank 0, without what the process held before.
"""

import ctypes
import gc
import os
import sys
from pathlib import Path

import torch
from torch import nn

from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.rank_processes import run_on_ranks
from benchmarks.shared.table import Column, table
from megatron_zpp.parallel.mesh import Ranks, join_ranks
from megatron_zpp.settings.config import ParallelConfig
from zeropp import Sharding, ZeroConfig, shard
from zeropp import fsdp_adapter as fsdp
from zeropp.capabilities.mixz.storage import store
from zeropp.optim.step_or_skip import local_part
from zeropp.ranks.topology import Environment
from zeropp.sharding.shard import allocate_meta_tensors, allocate_parameters
from zeropp.wire.quantized_shard import stored_bytes

CONFIG = ZeroConfig.from_json(
    {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True},
    }
)
RESET_PEAK = "5"  # resets the peak of resident memory: proc(5), clear_refs


def measure(options: Options, result: dict) -> None:
    """Measure on ranks, and what share of bf16's bytes there is."""
    result |= run_on_ranks(__spec__.name, options.ranks, options)
    result["share"] = result["bytes_int8"] / result["bytes_bf16"]
    result["resident_share"] = result["resident_int8"] / result["resident_bf16"]
    result["loading_share"] = result["loading_peak"] / result["resident_bf16"]


def on_rank(options: Options) -> dict:
    """Measure both ways to INT8 weights."""
    ranks = join_ranks(Environment.read(), ParallelConfig())
    return {"ranks": ranks.num_ranks, **load(options, ranks), **quantize(options, ranks)}


def load(options: Options, ranks: Ranks) -> dict[str, int]:
    """The peak of memory while matrices are loaded one by one into INT8."""
    sharding = sharded(options, ranks)
    before = resident()
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    sharding = allocate_parameters(sharding, CONFIG, ranks.device)
    for parameter in sharding.model.parameters():
        matrix = local_part(parameter)
        matrix.copy_(torch.empty(matrix.shape).normal_(0, 0.02))
    return {"loading_peak": peak() - before}


def quantize(options: Options, ranks: Ranks) -> dict[str, int]:
    """What bf16 shards take, and what they take once they are stored as INT8."""
    sharding = sharded(options, ranks)
    before = resident()
    allocate_meta_tensors(sharding.model, lambda _: ranks.device)
    fsdp.refresh_parameters(sharding.units)
    shards = [local_part(parameter) for parameter in sharding.model.parameters()]
    for matrix in shards:
        matrix.normal_(0, 0.02)
    bytes_bf16 = sum(matrix.nbytes for matrix in shards)
    del matrix, shards
    resident_bf16 = resident() - before
    store(sharding, CONFIG)
    return {
        "bytes_bf16": bytes_bf16,
        "resident_bf16": resident_bf16,
        "bytes_int8": stored_bytes(sharding.model)[0],
        "resident_int8": resident() - before,
    }


def sharded(options: Options, ranks: Ranks) -> Sharding:
    """Frozen bf16 matrices on the meta device, sharded."""
    with torch.device("meta"):
        shape = options.hidden, options.hidden
        model = nn.Sequential(*(nn.Linear(*shape, bias=False) for _ in range(options.layers)))
    model.bfloat16().requires_grad_(False)
    return shard(model, ranks.mesh, CONFIG, units=list(model))


def resident() -> int:
    """Resident bytes of this process, after free memory was returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """The peak of resident bytes since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def show(result: dict) -> str:
    """The bytes of bf16 and INT8 weights, and the peak of loading."""
    rows = [
        {"what": what, "bytes": result[name], "share": share}
        for what, name, share in (
            ("bf16 shards", "bytes_bf16", None),
            ("bf16 shards, resident", "resident_bf16", None),
            ("INT8 shards", "bytes_int8", result["share"]),
            ("INT8 shards, resident", "resident_int8", result["resident_share"]),
            ("peak while INT8 shards are loaded", "loading_peak", result["loading_share"]),
        )
    ]
    megabytes = Column("MB of a rank", "bytes", ".1f", 1e-6)
    return table(rows, Column("", "what"), megabytes, Column("of bf16", "share", ".3f"))


OPTIONS = (
    Flag("--ranks", 2, least=1),
    Flag("--layers", 32, "matrices"),
    Flag("--hidden", 4096, "rows and columns of each"),
)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
