"""The memory that frozen weights take on a rank, as zeropp counts it and as the system does.

    zeropp --num_ranks 2 --module benchmarks.memory.frozen_memory [--layers 16] [--hidden 4096]

Each rank holds its shards of some square matrices: first loaded one by one into INT8, then in bf16,
then these converted to INT8. Resident memory and its peak are what the system counts for the
process. All numbers are those of rank 0, without what the process held before.
"""

import argparse
import ctypes
import gc
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from megatron_zpp.parallel.mesh import Ranks, join_ranks
from megatron_zpp.settings.config import ParallelConfig
from zeropp import Sharding, ZeroConfig, shard
from zeropp import fsdp_adapter as fsdp
from zeropp.optim.step import local_part
from zeropp.ranks.topology import Environment
from zeropp.sharding.materialize import allocate_meta_tensors
from zeropp.sharding.shard import allocate_parameters, store_frozen
from zeropp.wire.frozen_weights import stored_bytes

CONFIG = ZeroConfig.from_json(
    {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True},
    }
)
RESET_PEAK = "5"  # resets the peak of resident memory: proc(5), clear_refs


def main() -> None:
    """Measure both ways to INT8 weights; rank 0 prints the numbers as JSON."""
    options = read_options()
    ranks = join_ranks(Environment.read(), ParallelConfig())
    result = {"ranks": ranks.num_ranks, **load(options, ranks), **quantize(options, ranks)}
    result["share"] = result["bytes_int8"] / result["bytes_bf16"]
    result["resident_share"] = result["resident_int8"] / result["resident_bf16"]
    result["loading_share"] = result["loading_peak"] / result["resident_bf16"]
    if ranks.rank == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


def load(options: argparse.Namespace, ranks: Ranks) -> dict[str, int]:
    """The peak of memory while matrices are loaded one by one into INT8."""
    sharding = sharded(options, ranks)
    before = resident()
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    sharding = allocate_parameters(sharding, CONFIG, ranks.device)
    for parameter in sharding.model.parameters():
        matrix = local_part(parameter)
        matrix.copy_(torch.empty(matrix.shape).normal_(0, 0.02))
    return {"loading_peak": peak() - before}


def quantize(options: argparse.Namespace, ranks: Ranks) -> dict[str, int]:
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
    store_frozen(sharding, CONFIG)
    return {
        "bytes_bf16": bytes_bf16,
        "resident_bf16": resident_bf16,
        "bytes_int8": stored_bytes(sharding.model)[0],
        "resident_int8": resident() - before,
    }


def sharded(options: argparse.Namespace, ranks: Ranks) -> Sharding:
    """Frozen bf16 matrices on the meta device, sharded."""
    with torch.device("meta"):
        shape = options.hidden, options.hidden
        model = nn.Sequential(*(nn.Linear(*shape, bias=False) for _ in range(options.layers)))
    model.bfloat16().requires_grad_(False)
    return shard(model, ranks.mesh, CONFIG, units=list(model))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32, help="matrices (default: 32)")
    parser.add_argument("--hidden", type=int, default=4096, help="rows, columns (default: 4096)")
    return parser.parse_args()


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


if __name__ == "__main__":
    main()
