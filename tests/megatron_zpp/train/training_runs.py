"""Runs `pretrain` on the ranks of a test, in process, and reads its log."""

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_zpp.capabilities.local_sgd.replicas import ElasticLocalSGD, LocalSGD
from megatron_zpp.interchange.open_model import open_model
from megatron_zpp.monitor.console import Console
from megatron_zpp.parallel.mesh import Ranks, build_mesh
from megatron_zpp.parallel.replicas import Replicas
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import Config
from megatron_zpp.train.build import build_run
from megatron_zpp.train.pretrain import RankProgram
from megatron_zpp.train.resume import with_own_folders
from megatron_zpp.train.run import Run
from megatron_zpp.train.stop import Stopping
from tests.ranks import ranks
from tests.worlds import worlds
from zeropp.capabilities.local_sgd.elastic_group import ElasticGroup
from zeropp.capabilities.local_sgd.outer_group import OuterGroup
from zeropp.ranks.process_group import pick_device
from zeropp.ranks.topology import Environment

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-2 "
    "--tokenizer-type NullTokenizer --vocab-size 50 --num-workers 0 "
    "--make-vocab-size-divisible-by 8 --log-interval 1 --eval-iters 0 --eval-interval 1000 "
)
RELATIVE = 1e-5  # the promise for unquantized fp32 runs


def log_of(
    flags: str,
    device: str = "cpu",
    kind: type[Ranks] = Ranks,
    outer: OuterGroup | ElasticGroup | None = None,
) -> str:
    """What rank 0 prints for `TINY` and `flags` on the ranks of this test's process group.

    The samples are made up unless `flags` name a dataset. With an `outer` group, nodes step alone.
    """
    printed = io.StringIO()
    with _job(flags, printed, device, kind, outer) as (config, ranks, console, stopping):
        RankProgram(
            config=config, ranks=ranks, console=console, stopping=stopping, open_model=open_model
        ).pretrain()
    return printed.getvalue()


def log_of_asynchronous(flags: str) -> str:
    """`log_of`, the numbers of an iteration read while the next one runs, as with a GPU."""
    return log_of(flags, kind=AsynchronousRanks)


class AsynchronousRanks(Ranks):
    """Ranks on CPUs that log an iteration while the next one runs, as ranks on GPUs do."""

    asynchronous = True


@contextmanager
def built_run(flags: str, outer: OuterGroup | ElasticGroup | None = None) -> Iterator[Run]:
    """The run of `TINY` and `flags` on these ranks, before its first iteration."""
    with _job(flags, io.StringIO(), outer=outer) as job:
        yield build_run(*job, open_model)


def write_log(flags: str, path: Path) -> None:
    """Run on all ranks and leave rank 0's log at `path`."""
    log = log_of(flags)
    if dist.get_rank() == 0:
        path.write_text(log)


def run(num_ranks: int, flags: str, folder: Path) -> str:
    """The log of a run on `num_ranks` ranks: 1, 2, 4 or 8."""
    path = folder / "log.txt"
    ON_RANKS[num_ranks](write=write_log, arguments=(flags, path))
    return path.read_text()


def run_alone(num_ranks: int, world: int, flags: str, folder: Path) -> str:
    """The log of a run on 2 or 4 ranks, of which `world` to a node step alone."""
    path = folder / "log.txt"
    ON_RANKS[num_ranks](write=write_log_alone, arguments=(world, flags, path))
    return path.read_text()


@ranks(1, timeout=120)
def on_1(write: Callable, arguments: tuple) -> None:
    write(*arguments)


@ranks(2, timeout=120)
def on_2(write: Callable, arguments: tuple) -> None:
    write(*arguments)


@ranks(4, timeout=120)
def on_4(write: Callable, arguments: tuple) -> None:
    write(*arguments)


@ranks(8, timeout=240)
def on_8(write: Callable, arguments: tuple) -> None:
    write(*arguments)


ON_RANKS = {1: on_1, 2: on_2, 4: on_4, 8: on_8}


def write_log_alone(world: int, flags: str, path: Path) -> None:
    """Run on all ranks, and leave the first one's log at `path`."""
    rank = dist.get_rank()
    with TemporaryDirectory() as own, worlds(world, shared_folder(own)) as outer:
        log = log_of(flags, outer=outer)
    if rank == 0:
        path.write_text(log)


def shared_folder(own: str) -> Path:
    """Return the first rank's folder on all ranks."""
    folders = [None] * dist.get_world_size()
    dist.all_gather_object(folders, own)
    return Path(folders[0])


def with_json(zero: Mapping | None = None, *, more: Mapping | None = None, **zeropp: object) -> str:
    """The flag of a JSON with these sections, and `more` ones."""
    sections = {"zero_optimization": dict(zero or {}), "zeropp": zeropp, **(more or {})}
    return f" --deepspeed_config {json.dumps(sections, separators=(',', ':'))} "


def tensors_of(run: Run) -> dict[str, Tensor]:
    """Copies of the whole weights and of the buffers of a run."""
    model = run.trainer.sharding.model
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in (*model.named_parameters(), *model.named_buffers())
    }


def losses(log: str) -> list[str]:
    """The printed training losses."""
    return re.findall(r"lm loss: (\S+) \|", log)


def field(log: str, name: str) -> list[str]:
    """The printed values of a field of the log line."""
    return re.findall(rf"{re.escape(name)}: *(\S+) \|", log)


def loss_values(log: str) -> list[float]:
    return [float(loss) for loss in losses(log)]


def require_equal(log: str, expected: str) -> None:
    """Require losses and norms that are those of another log, but for rounding."""
    for name in ("lm loss", "grad norm"):
        numbers, others = (list(map(float, field(each, name))) for each in (log, expected))
        assert len(numbers) == len(others) > 0
        assert numbers == pytest.approx(others, rel=RELATIVE), name


def held_out(log: str) -> list[str]:
    """The printed losses of evaluations."""
    return re.findall(r"loss at .*? value: (\S+)", log)


def require_same_digits_after_a_stop(
    num_ranks: int, flags: str, folder: Path, stop: int = 2, rest: str = ""
) -> tuple[str, str]:
    """Require all digits of a run in one that goes on from its checkpoint after `stop` iterations.

    `rest`: flags of what goes on. Returns the logs of both.
    """
    saved = folder / "saved"
    straight = run(num_ranks, f"{flags} --save {saved} --save-interval {stop}", folder)
    second = run(num_ranks, f"{flags} --load {saved} --ckpt-step {stop} {rest}", folder)
    assert losses(second) == losses(straight)[stop:] != []
    for name in ("grad norm", "learning rate", "loss scale", "consumed samples"):
        assert field(second, name) == field(straight, name)[-len(field(second, name)) :], name
    assert held_out(second) == held_out(straight)[len(held_out(straight)) - len(held_out(second)) :]
    return straight, second


@contextmanager
def _job(
    flags: str,
    printed: io.StringIO,
    device: str = "cpu",
    kind: type[Ranks] = Ranks,
    outer: OuterGroup | ElasticGroup | None = None,
) -> Iterator[tuple[Config, Ranks, Console, Stopping]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    source = "" if "--data-path" in flags else "--mock-data "
    others = 1 if outer is None or isinstance(outer, ElasticGroup) else outer.size  # of one launch
    config = parse((TINY + source + flags).split(), world * others)
    if device != "cpu":
        pick_device(Environment.read())  # ranks share the GPUs
    mesh = build_mesh(torch.device(device), world, config.parallel)
    place = Environment(rank=rank, world_size=world, local_rank=rank, local_world_size=world)
    size = config.parallel.context_parallel_size
    replicas = Replicas()
    if outer is not None:
        replicas = ElasticLocalSGD(outer) if isinstance(outer, ElasticGroup) else LocalSGD(outer)
    joined = kind(
        environment=place, device=torch.device(device), mesh=mesh, store=None, context_size=size,
        ranks_per_node=config.zero.zeropp.ranks_per_node, replicas=replicas,
    )  # fmt: skip
    config = replace(config, checkpoint=with_own_folders(config.checkpoint, joined))
    with Console(rank, printed, interactive=False) as console, Stopping(config.training) as stop:
        yield config, joined, console, stop
