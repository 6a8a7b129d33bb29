"""What frozen weights take of a rank's memory, by this program's account and by the system's.

    zeropp --num_ranks 2 benchmarks/frozen_memory.py [--layers 16] [--hidden 4096]

Each rank holds its shards of as many square matrices, in bf16, then as INT8. Resident memory is the
system's count for the process; both are shown of the first rank, each less what there was before.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from megatron_zpp.config import ParallelConfig  # noqa: E402
from megatron_zpp.parallel.mesh import join_ranks  # noqa: E402
from zeropp import ZeroConfig, shard  # noqa: E402
from zeropp.frozen import stored_bytes  # noqa: E402
from zeropp.optim.step import local_part  # noqa: E402
from zeropp.stages import store_frozen  # noqa: E402
from zeropp.topology import Environment  # noqa: E402

CONFIG = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True},
}


def main() -> None:
    """Shard, count, quantize, count again; rank 0 prints the numbers as JSON."""
    options = read_options()
    ranks = join_ranks(Environment.read(), ParallelConfig())
    config = ZeroConfig.from_json(CONFIG)
    with torch.device("meta"):
        shape = options.hidden, options.hidden
        model = nn.Sequential(*(nn.Linear(*shape, bias=False) for _ in range(options.layers)))
    model.bfloat16().requires_grad_(False)
    sharding = shard(model, ranks.mesh, config, units=list(model))
    before = resident()
    model.to_empty(device="cpu")
    for one in model.parameters():
        local_part(one).normal_(0, 0.02)
    wide = sum(local_part(one).nbytes for one in model.parameters())
    as_numbers = resident() - before
    store_frozen(sharding, config)
    as_codes, (packed, _) = resident() - before, stored_bytes(model)
    if ranks.rank == 0:
        found = {
            "ranks": ranks.num_ranks, "bytes_bf16": wide, "resident_bf16": as_numbers,
            "bytes_int8": packed, "resident_int8": as_codes, "share": packed / wide,
            "resident_share": as_codes / as_numbers,
        }  # fmt: skip
        print(json.dumps(found))
    dist.destroy_process_group()


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


if __name__ == "__main__":
    main()
