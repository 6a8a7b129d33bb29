"""Runs the whole job on the ranks of a test, in process, and reads its log."""

import io
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron_zpp.arguments import parse
from megatron_zpp.console import Console
from megatron_zpp.main import pretrain
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.stopping import Stopping
from zeropp.topology import Environment

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-2 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 50 --num-workers 0 "
    "--make-vocab-size-divisible-by 8 --log-interval 1 --eval-iters 1 --eval-interval 1000 "
)


def log_of(flags: str) -> str:
    """What rank 0 prints for `TINY` and `flags` on the ranks of this test's process group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = parse((TINY + flags).split(), world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    place = Environment(rank=rank, world_size=world, local_rank=rank, local_world_size=world)
    ranks = Ranks(environment=place, device=torch.device("cpu"), mesh=mesh, store=None)
    printed = io.StringIO()
    with Console(rank, printed, interactive=False) as console, Stopping(config.training) as stop:
        pretrain(config, ranks, console, stop)
    return printed.getvalue()


def write_log(flags: str, path: Path) -> None:
    """Run on all ranks and leave rank 0's log at `path`."""
    log = log_of(flags)
    if dist.get_rank() == 0:
        path.write_text(log)


def losses(log: str) -> list[str]:
    """The printed training losses."""
    return re.findall(r"lm loss: (\S+) \|", log)


def field(log: str, name: str) -> list[str]:
    """The printed values of a field of the log line."""
    return re.findall(rf"{re.escape(name)}: *(\S+) \|", log)


def numbers(log: str) -> list[float]:
    return [float(loss) for loss in losses(log)]
