"""The console script `zeropp`: starts one rank per GPU of this machine, or N ranks on its CPU.

    zeropp [--num_gpus N | --num_ranks N] [--ranks_per_node N] [--bind_cores_to_rank]
           script.py [arguments of the script]

A thin layer over torch's elastic agent: the ranks meet on a free port, a dead rank ends the others,
SIGINT and SIGTERM go to the ranks, which get time to save. What the ranks print is all that is
printed, with one line at the end when they fail. Several machines are started by torchrun or Slurm.
"""

import argparse
import dataclasses
import logging
import os
import signal
import sys
import uuid
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from zeropp.errors import InputError
from zeropp.ranks.topology import cores, share_cores

SAVE_SECONDS = 300  # for the ranks to save after SIGINT or SIGTERM, before SIGKILL
ONE_MACHINE = "127.0.0.1"
LOCAL_RANK = "${local_rank}"  # the agent puts the number in its place
RANK_SCRIPT = Path(__file__).with_name("rank_main.py")


def main(arguments: list[str] | None = None) -> int:
    """Run a script on every rank; return 0, a failed rank's exit code, or 128 + a signal."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        num_ranks = _num_ranks(options)
        _check(options, num_ranks)
    except InputError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    share_cores(num_ranks)
    logging.disable(logging.CRITICAL)  # torch's agent; the ranks have their own logs
    program, *arguments = _command(options, num_ranks)
    try:
        elastic_launch(_one_machine(num_ranks), program)(*arguments)
    except ChildFailedError as failed:
        return _report(failed.failures)
    except SignalException as stopped:
        return _stopped(stopped.sigval)
    except KeyboardInterrupt:
        return _stopped(signal.SIGINT)
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="zeropp", allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--num_nodes", "--num-nodes", type=int, default=1, metavar="N")
    count = parser.add_mutually_exclusive_group()
    count.add_argument(
        "--num_gpus", "--num-gpus", type=int, metavar="N", help="ranks, one per GPU (default: all)"
    )
    count.add_argument(
        "--num_ranks", "--num-ranks", type=int, metavar="N", help="ranks, with or without GPUs"
    )
    parser.add_argument(
        "--ranks_per_node",
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="treat every N ranks of this machine as one node",
    )
    parser.add_argument(
        "--bind_cores_to_rank",
        "--bind-cores-to-rank",
        action="store_true",
        help="keep each rank on cores of its own; not for two jobs on one machine",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="script.py ...")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise InputError(f"unknown option {unknown[0]} before the script; see zeropp --help")
    return options


def _num_ranks(options: argparse.Namespace) -> int:
    """How many ranks to start here; says so where it was not asked for and there is no GPU."""
    num_gpus = torch.cuda.device_count()
    if options.num_ranks is not None:
        return options.num_ranks
    if options.num_gpus is not None:
        if options.num_gpus > num_gpus:
            raise InputError(
                f"--num_gpus {options.num_gpus}: this machine has {num_gpus}; "
                f"--num_ranks {options.num_gpus} starts that many ranks on what there is"
            )
        return options.num_gpus
    if not num_gpus:
        print("zeropp: no GPU here: 1 rank on the CPU (--num_ranks N starts more)", flush=True)
    return num_gpus or 1


def _check(options: argparse.Namespace, num_ranks: int) -> None:
    if options.num_nodes != 1:
        raise InputError(
            f"--num_nodes {options.num_nodes}: zeropp starts the ranks of one machine. "
            f"For several, run this on each of them (under Slurm: srun, one task per machine):\n"
            f"  torchrun --nnodes {options.num_nodes} --nproc-per-node RANKS --rdzv-backend c10d "
            f"--rdzv-endpoint FIRST_MACHINE:29500 {' '.join(options.command)}"
        )
    if num_ranks < 1:
        raise InputError(f"{num_ranks} ranks: expected at least 1")
    per_node = options.ranks_per_node
    if per_node is not None and (per_node < 1 or num_ranks % per_node):
        raise InputError(f"--ranks_per_node {per_node}: expected a divisor of {num_ranks} ranks")
    if options.bind_cores_to_rank and num_ranks > len(cores()):
        raise InputError(
            f"--bind_cores_to_rank: {num_ranks} ranks on {len(cores())} cores that may be used "
            "leave some without one; leave it out, or start fewer ranks"
        )
    if not options.command:
        raise InputError("no script given: zeropp [options] script.py [arguments of the script]")
    if not Path(options.command[0]).is_file():
        raise InputError(f"no such script: {options.command[0]}")


def _command(options: argparse.Namespace, num_ranks: int) -> list[str]:
    """What each rank executes; `env` gives it nodes of another size than the agent does."""
    share = len(cores()) // num_ranks if options.bind_cores_to_rank else 0
    begin = [sys.executable, "-u", str(RANK_SCRIPT), str(os.getpid()), str(share), LOCAL_RANK]
    rank = [*begin, *options.command]
    per_node = options.ranks_per_node
    return rank if per_node is None else ["/usr/bin/env", f"LOCAL_WORLD_SIZE={per_node}", *rank]


def _one_machine(num_ranks: int) -> LaunchConfig:
    """The agent's settings: one machine, a free port, no restarts."""
    patience = {"shutdown_timeout": SAVE_SECONDS}  # not in torch 2.11: 30 s there
    known = {one.name for one in dataclasses.fields(LaunchConfig)}
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{ONE_MACHINE}:0",
        local_addr=ONE_MACHINE,
        max_restarts=0,
        **{name: value for name, value in patience.items() if name in known},
    )


def _report(failures: dict[int, ProcessFailure]) -> int:
    """Name the rank that failed first, in one line; return the exit code to end with.

    The others follow it within one look of the agent, and are then ended with SIGTERM: a rank
    killed by another signal comes first, then one that exited by itself, in order of time.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, float, int]:
        rank, failure = item
        terminated = failure.exitcode == -signal.SIGTERM
        return terminated, failure.exitcode > 0, failure.timestamp, rank

    rank, failure = min(failures.items(), key=order)
    code = failure.exitcode
    if code > 0:
        print(f"zeropp: rank {rank} exited with code {code}", file=sys.stderr)
        return code
    hint = " (often by the system, out of memory)" if code == -signal.SIGKILL else ""
    name = signal.Signals(-code).name
    print(f"zeropp: rank {rank} was killed by {name}{hint}", file=sys.stderr)
    return 128 - code


def _stopped(by: signal.Signals) -> int:
    print(f"zeropp: stopped by {by.name}", file=sys.stderr)
    return 128 + by


if __name__ == "__main__":
    sys.exit(main())
