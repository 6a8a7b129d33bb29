"""The command `zeropp`: start one rank per GPU of this machine, or N ranks on its CPU.

    zeropp [--num_gpus N | --num_ranks N] [--ranks_per_node N] [--bind_cores_to_rank]
           script.py [arguments of the script]
    zeropp [options] --module package.module [arguments of the module]

It is a thin layer over PyTorch's elastic agent. The ranks rendezvous on a free port. If a rank
fails, the others are terminated; with --max_restarts N all are started again, up to N times. SIGINT
and SIGTERM are forwarded to the ranks, which have time to save. Only the output of the ranks is
printed, and one line that names the rank whenever one has failed. To use several machines, start
the script with torchrun or Slurm.
"""

import argparse
import dataclasses
import importlib.util
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from zeropp.errors import InputError
from zeropp.ranks.process_group import OTHER_RANK_FAILED
from zeropp.ranks.topology import share_cores, usable_cores

SAVE_SECONDS = 300  # between SIGINT or SIGTERM and SIGKILL, for the ranks to save
USAGE_ERROR = 2  # exit code of a rank that no restart would help
AGENT_SECONDS = 30  # the agent's, between SIGTERM and SIGKILL once a rank has failed
CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
LOCALHOST = "127.0.0.1"
LOCAL_RANK = "${local_rank}"  # the agent replaces it with the number
RANK_SCRIPT = Path(__file__).with_name("rank_main.py")


def main(arguments: list[str] | None = None) -> int:
    """Run a script or module on every rank; return 0, a failed rank's exit code, or 128 + a signal.

    Wrong options print one line `error: ...` and return 2.
    """
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        num_ranks = _num_ranks(options)
        _check(options, num_ranks)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    share_cores(num_ranks)
    logging.disable(logging.CRITICAL)  # torch's agent; the ranks have their own logs
    try:
        return _run(_command(options, num_ranks), num_ranks, options.max_restarts)
    except SignalException as error:
        return _report_signal(error.sigval)
    except KeyboardInterrupt:
        return _report_signal(signal.SIGINT)


def _run(command: list[str], num_ranks: int, max_restarts: int) -> int:
    """Run the ranks until they succeed or have failed `1 + max_restarts` times; return the status.

    Each attempt has an agent of its own, with a new store and a new port.
    """
    program, *arguments = command
    ended = EndedChildren()
    for restart in range(1, max_restarts + 2):
        try:
            with tempfile.TemporaryDirectory(prefix="zeropp-") as folder:
                elastic_launch(_launch_config(num_ranks, folder), program)(*arguments)
            return 0
        except ChildFailedError as error:
            status = _report_failure(error.failures, ended.times)
        if status == USAGE_ERROR:
            break
        if restart <= max_restarts:
            print(f"zeropp: restart {restart} of {max_restarts}", file=sys.stderr, flush=True)
    return status


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
        "--max_restarts",
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start all ranks again after a failure, at most N times (default: 0)",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="run a module, as python -m does, not a script"
    )
    version = importlib.import_module("zeropp").__version__
    parser.add_argument("--version", action="version", version=f"zeropp {version}")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="script.py ...")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise InputError(f"unknown option {unknown[0]} before the script; see zeropp --help")
    return options


def _num_ranks(options: argparse.Namespace) -> int:
    """Return the number of ranks to start; print it if it was not given and there is no GPU."""
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
    if options.max_restarts < 0:
        raise InputError(f"--max_restarts {options.max_restarts}: expected at least 0")
    node_size = options.ranks_per_node
    if node_size is not None and (node_size < 1 or num_ranks % node_size):
        raise InputError(f"--ranks_per_node {node_size}: expected a divisor of {num_ranks} ranks")
    if options.bind_cores_to_rank and num_ranks > len(usable_cores()):
        raise InputError(
            f"--bind_cores_to_rank: {num_ranks} ranks need {num_ranks} cores, and this process may "
            f"use {len(usable_cores())}; leave the option out or start fewer ranks"
        )
    if not options.command:
        raise InputError("no script given: zeropp [options] script.py [arguments of the script]")
    name = options.command[0]
    if options.module and not _can_run_module(name):
        raise InputError(f"no module to run: {name}; expected a name as for python -m")
    if not options.module and not Path(name).is_file():
        raise InputError(f"no such script: {name}")


def _can_run_module(name: str) -> bool:
    """Return whether `python -m name` would find a module, or a package with `__main__.py`.

    Neither the module nor its packages are imported.
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
    """Return the script or module with its arguments: the end of the command line of a rank."""
    return ["--module", *options.command] if options.module else options.command


def _command(options: argparse.Namespace, num_ranks: int) -> list[str]:
    """Return the command line of each rank; `env` overrides the node size that the agent sets."""
    num_cores = len(usable_cores()) // num_ranks if options.bind_cores_to_rank else 0
    command = [
        *(sys.executable, "-u", str(RANK_SCRIPT)),
        *(str(os.getpid()), str(num_cores), LOCAL_RANK),
        *_program(options),
    ]
    if options.ranks_per_node is None:
        return command
    return ["/usr/bin/env", f"LOCAL_WORLD_SIZE={options.ranks_per_node}", *command]


def _launch_config(num_ranks: int, folder: str) -> LaunchConfig:
    """Return the settings of the agent: one machine, a free port, one attempt.

    `folder` is for the agent's own files, which it does not remove.
    """
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
        rdzv_endpoint=f"{LOCALHOST}:0",
        local_addr=LOCALHOST,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        **settings,
    )


class EndedChildren:
    """When each child of this process ended; the agent looks ten times a second and says not when.

    `times`: process id -> seconds since the epoch. Of children that end at the same moment
    only the first may be there. Installs a handler for SIGCHLD; the main thread must create it.
    """

    def __init__(self) -> None:
        self.times: dict[int, float] = {}
        if hasattr(os, "waitid"):  # not on macOS before Python 3.13
            signal.signal(signal.SIGCHLD, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        try:
            child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # the agent was faster
            return
        if child is not None:
            self.times.setdefault(child.si_pid, time.time())


def _report_failure(failures: dict[int, ProcessFailure], ended: dict[int, float]) -> int:
    """Print one line that names the rank that failed; return the launcher's exit code.

    `ended` are the times at which processes ended. That is the rank that ended first, with three
    exceptions. The kernel may close the connections of a crashed process before it reports its end,
    so that others fail first. A rank that says it ended because of another one (a hung one) is not
    the cause. Neither is one that the agent terminated, as it does with all after the first.
    """
    times = {rank: ended.get(each.pid, each.timestamp + 1) for rank, each in failures.items()}
    first = min(times.values())

    def in_time(rank: int) -> bool:
        return times[rank] - first < AGENT_SECONDS / 2

    def sort_key(rank: int) -> tuple[bool, bool, float, int]:
        code = failures[rank].exitcode
        crashed = -code in CRASHES and in_time(rank)
        terminated = code in (-signal.SIGTERM, 128 + signal.SIGTERM) and times[rank] != first
        return not crashed, terminated or code == OTHER_RANK_FAILED, times[rank], rank

    rank = min(failures, key=sort_key)
    code = failures[rank].exitcode
    if code > 0:
        print(f"zeropp: rank {rank} exited with code {code}", file=sys.stderr)
        return code
    name = signal.Signals(-code).name
    if code == -signal.SIGKILL and not in_time(rank):
        text = f"zeropp: rank {rank} did not respond and was ended with {name}"
    else:
        hint = " (often by the system, out of memory)" if code == -signal.SIGKILL else ""
        text = f"zeropp: rank {rank} was killed by {name}{hint}"
    print(text, file=sys.stderr)
    return 128 - code


def _report_signal(number: signal.Signals) -> int:
    print(f"zeropp: stopped by {number.name}", file=sys.stderr)
    return 128 + number


if __name__ == "__main__":
    sys.exit(main())
