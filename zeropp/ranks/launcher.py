"""The console script `zeropp`: starts one rank per GPU of this machine, or N ranks on its CPU.

    zeropp [--num_gpus N | --num_ranks N] [--ranks_per_node N] [--bind_cores_to_rank]
           script.py [arguments of the script]
    zeropp [options] --module package.module [arguments of the module]

A thin layer over torch's elastic agent. The ranks rendezvous on a free port. When a rank dies, the
others are ended. SIGINT and SIGTERM are passed on to the ranks, which get time to save. Only the
ranks' own output is printed, and one line at the end if they fail. To use several machines, start
the script with torchrun or Slurm.
"""

import argparse
import dataclasses
import importlib.util
import logging
import os
import signal
import sys
import uuid
from importlib.machinery import PathFinder
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
    """Run a script or module on every rank; return 0, a failed rank's exit code, or 128 + a signal.

    Wrong options print one line `error: ...` and return 2.
    """
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
        help="pin each rank to its own cores; not for two jobs on one machine",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="run a module, as python -m does, not a script"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="script.py ...")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise InputError(f"unknown option {unknown[0]} before the script; see zeropp --help")
    return options


def _num_ranks(options: argparse.Namespace) -> int:
    """The number of ranks to start; prints it if no number was given and there is no GPU."""
    num_gpus = torch.cuda.device_count()
    if options.num_ranks is not None:
        return options.num_ranks
    if options.num_gpus is not None:
        if options.num_gpus > num_gpus:
            raise InputError(
                f"--num_gpus {options.num_gpus}: this machine has {num_gpus}; "
                f"--num_ranks {options.num_gpus} starts that many ranks anyway"
            )
        return options.num_gpus
    if not num_gpus:
        print("zeropp: no GPU here: 1 rank on the CPU (--num_ranks N starts more)", flush=True)
    return num_gpus or 1


def _check(options: argparse.Namespace, num_ranks: int) -> None:
    if options.num_nodes != 1:
        raise InputError(
            f"--num_nodes {options.num_nodes}: zeropp starts the ranks of one machine. "
            f"For several machines, run this on each (under Slurm: srun, one task per machine):\n"
            f"  torchrun --nnodes {options.num_nodes} --nproc-per-node RANKS --rdzv-backend c10d "
            f"--rdzv-endpoint FIRST_MACHINE:29500 {' '.join(_program(options))}"
        )
    if num_ranks < 1:
        raise InputError(f"{num_ranks} ranks: expected at least 1")
    per_node = options.ranks_per_node
    if per_node is not None and (per_node < 1 or num_ranks % per_node):
        raise InputError(f"--ranks_per_node {per_node}: expected a divisor of {num_ranks} ranks")
    if options.bind_cores_to_rank and num_ranks > len(cores()):
        raise InputError(
            f"--bind_cores_to_rank: {num_ranks} ranks need {num_ranks} cores, and this process may "
            f"use {len(cores())}; leave the option out or start fewer ranks"
        )
    if not options.command:
        raise InputError("no script given: zeropp [options] script.py [arguments of the script]")
    name = options.command[0]
    if options.module and not _can_run_module(name):
        raise InputError(f"no module to run: {name}; expected a name as for python -m")
    if not options.module and not Path(name).is_file():
        raise InputError(f"no such script: {name}")


def _can_run_module(name: str) -> bool:
    """Whether `python -m name` would find a module, or a package with `__main__.py`.

    Nothing is imported: neither the module nor the packages it is in.
    """
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return False
    spec = PathFinder.find_spec(parts[0], [os.getcwd()]) or importlib.util.find_spec(parts[0])
    for part in parts[1:]:
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    if spec is None or spec.submodule_search_locations is None:
        return spec is not None
    return PathFinder.find_spec("__main__", list(spec.submodule_search_locations)) is not None


def _program(options: argparse.Namespace) -> list[str]:
    """The script or module with its arguments, as the command line of a rank ends."""
    return ["--module", *options.command] if options.module else options.command


def _command(options: argparse.Namespace, num_ranks: int) -> list[str]:
    """The command line of each rank; `env` overrides the node size that the agent sets."""
    num_cores = len(cores()) // num_ranks if options.bind_cores_to_rank else 0
    command = [
        *(sys.executable, "-u", str(RANK_SCRIPT)),
        *(str(os.getpid()), str(num_cores), LOCAL_RANK),
        *_program(options),
    ]
    if options.ranks_per_node is None:
        return command
    return ["/usr/bin/env", f"LOCAL_WORLD_SIZE={options.ranks_per_node}", *command]


def _one_machine(num_ranks: int) -> LaunchConfig:
    """The agent's settings: one machine, a free port, no restarts."""
    supported = {field.name for field in dataclasses.fields(LaunchConfig)}
    settings = {}
    if "shutdown_timeout" in supported:  # torch 2.11 always waits 30 s
        settings["shutdown_timeout"] = SAVE_SECONDS
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{ONE_MACHINE}:0",
        local_addr=ONE_MACHINE,
        max_restarts=0,
        **settings,
    )


def _report(failures: dict[int, ProcessFailure]) -> int:
    """Print which rank failed first, in one line; return the exit code of the launcher.

    When one rank fails, others may fail before the agent looks again, and the agent ends the rest
    with SIGTERM. So the cause is a rank killed by another signal, else the one that exited first.
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


def _stopped(number: signal.Signals) -> int:
    print(f"zeropp: stopped by {number.name}", file=sys.stderr)
    return 128 + number


if __name__ == "__main__":
    sys.exit(main())
