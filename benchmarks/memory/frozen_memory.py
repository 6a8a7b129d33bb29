"""What frozen weights take of a rank's memory, by this program's account and by the system's.

    zeropp --num_ranks 2 benchmarks/memory/frozen_memory.py [--layers 16] [--hidden 4096]

Each rank holds its shards of as many square matrices: as INT8 into which they were loaded one by
one, then in bf16, then these as INT8. Resident memory and its peak are the system's counts for the
process; all are shown of the first rank, each less what there was before.
"""

import argparse
import ctypes
import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from megatron_zpp.parallel.mesh import Ranks, join_ranks  # noqa: E402
from megatron_zpp.settings.config import ParallelConfig  # noqa: E402
from zeropp import Sharding, ZeroConfig, shard  # noqa: E402
from zeropp import fsdp_adapter as fsdp  # noqa: E402
from zeropp.optim.step import local_part  # noqa: E402
from zeropp.ranks.topology import Environment  # noqa: E402
from zeropp.sharding.materialize import allocate_meta_tensors  # noqa: E402
from zeropp.sharding.shard import allocate_parameters, store_frozen  # noqa: E402
from zeropp.wire.frozen_weights import stored_bytes  # noqa: E402

CONFIG = ZeroConfig.from_json(
    {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True},
    }
)
FORGET_PEAK = "5"  # proc(5): the peak of resident memory begins anew


def main() -> None:
    """Load into codes, and quantize what is there, counting; rank 0 prints the numbers as JSON."""
    options = read_options()
    ranks = join_ranks(Environment.read(), ParallelConfig())
    found = {"ranks": ranks.num_ranks, **load(options, ranks), **quantize(options, ranks)}
    found["share"] = found["bytes_int8"] / found["bytes_bf16"]
    found["resident_share"] = found["resident_int8"] / found["resident_bf16"]
    found["loading_share"] = found["loading_peak"] / found["resident_bf16"]
    if ranks.rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def load(options: argparse.Namespace, ranks: Ranks) -> dict[str, int]:
    """The most that is in memory while values come into codes, matrix by matrix."""
    sharding = sharded(options, ranks)
    before = resident()
    Path("/proc/self/clear_refs").write_text(FORGET_PEAK)
    sharding = allocate_parameters(sharding, CONFIG, ranks.device)
    for one in sharding.model.parameters():
        local_part(one).copy_(torch.empty(local_part(one).shape).normal_(0, 0.02))
    return {"loading_peak": peak() - before}


def quantize(options: argparse.Namespace, ranks: Ranks) -> dict[str, int]:
    """What bf16 shards take, and what they take once they are codes."""
    sharding = sharded(options, ranks)
    before = resident()
    allocate_meta_tensors(sharding.model, lambda _: ranks.device)
    fsdp.refresh_parameters(sharding.units)
    for one in sharding.model.parameters():
        local_part(one).normal_(0, 0.02)
    wide = sum(local_part(one).nbytes for one in sharding.model.parameters())
    as_numbers = resident() - before
    store_frozen(sharding, CONFIG)
    return {
        "bytes_bf16": wide, "resident_bf16": as_numbers,
        "bytes_int8": stored_bytes(sharding.model)[0], "resident_int8": resident() - before,
    }  # fmt: skip


def sharded(options: argparse.Namespace, ranks: Ranks) -> Sharding:
    """Frozen matrices in bf16 without memory."""
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
    """Bytes of this process that are in memory, once what is free has been given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """The most bytes of this process that were in memory since the peak was forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
