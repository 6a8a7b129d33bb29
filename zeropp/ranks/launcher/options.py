"""The options of the command `zeropp`, spelled as DeepSpeed's launcher spells them."""

import argparse
import importlib
import importlib.util
import os
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from zeropp.errors import InputError
from zeropp.ranks.topology import usable_cores

USAGE = """Start one rank per GPU of this machine, N ranks on its CPU, or those of several machines.

    zeropp [--num_gpus N | --num_ranks N] [--ranks_per_node N] [--bind_cores_to_rank]
           [--no_local_rank] script.py [arguments of the script]
    zeropp --hostfile FILE [--include HOSTS | --exclude HOSTS] [--num_nodes N] script.py ...
    zeropp [options] --module package.module [arguments of the module]
    zeropp --keep_store PORT

The script gets --local_rank=N before its arguments, as by DeepSpeed's launcher.
The ranks rendezvous on a free port, those of several machines at the first one. If a rank fails,
the others are terminated; with --max_restarts N all are started again, up to N times. SIGINT and
SIGTERM are forwarded to the ranks, which have time to save. Only the output of the ranks is
printed, and one line that names the rank whenever one has failed.
"""
MASTER_PORT = 29500
LAST_PORT = 2**16 - 1


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options; raises InputError for one that is unknown."""
    parser = argparse.ArgumentParser(prog="zeropp", allow_abbrev=False, description=USAGE)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_ranks(parser.add_argument_group("ranks"))
    _add_machines(parser.add_argument_group("several machines"))
    restarts = "start all ranks again after a failure, at most N times (default: 0)"
    _add(parser, "--max_restarts", type=int, default=0, metavar="N", help=restarts)
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


def _add(
    group: argparse._ActionsContainer, *names: str, type: type | None = int, **settings: Any
) -> None:
    """Add an option with a value, by default a number, spelled with underscores or with dashes."""
    spellings = [*names, *(name.replace("_", "-") for name in names if "_" in name)]
    group.add_argument(*spellings, **{"type": type, "metavar": "N"} | settings)


def _add_ranks(group: argparse._ArgumentGroup) -> None:
    count = group.add_mutually_exclusive_group()
    _add(count, "--num_gpus", help="ranks of each machine, one per GPU (default: all)")
    _add(count, "--num_ranks", help="ranks of each machine, with or without GPUs")
    _add(group, "--ranks_per_node", help="treat every N ranks of a machine as one node")
    group.add_argument(
        "--bind_cores_to_rank", "--bind-cores-to-rank", action="store_true",
        help="pin each rank to its own cores; not for two jobs on one machine",
    )  # fmt: skip
    group.add_argument(
        "--no_local_rank", "--no-local-rank", action="store_true",
        help="do not give the script --local_rank=N; the variable LOCAL_RANK is always set",
    )  # fmt: skip


def _add_machines(group: argparse._ArgumentGroup) -> None:
    def text(*names: str, metavar: str, help: str, default: str | None = None) -> None:
        _add(group, *names, type=None, metavar=metavar, help=help, default=default)

    def number(name: str, help: str, metavar: str = "PORT", default: int | None = None) -> None:
        _add(group, name, metavar=metavar, help=help, default=default)

    only = (
        "only these, as in worker-1@worker-2:0,2 (GPUs 0 and 2); localhost:0,2 without a hostfile"
    )
    own = "arguments of ssh in one word, as in --launcher_args='-i key'"
    address = "of the first machine, as the others reach it (default: as ssh reaches it)"
    port = f"at which the machines meet on the first one (default: {MASTER_PORT})"
    store = (
        "start no ranks, and keep the store of replicas that join and leave "
        "(zeropp.sync_store), at this port; 0: at a free one"
    )
    alone = (
        "run the ranks of machine N only (0: the first); for use without ssh, on every machine "
        "with --num_nodes and --master_addr"
    )
    hosts = "machines and ranks: a line HOST slots=N for each"
    text("-H", "--hostfile", metavar="FILE", help=hosts)
    text("-i", "--include", metavar="HOSTS", help=only, default="")
    text("-e", "--exclude", metavar="HOSTS", help="all but these, in the same format", default="")
    number("--num_nodes", "only the first N machines of the hostfile", "N")
    text("--master_addr", metavar="ADDRESS", help=address)
    number("--master_port", port, default=MASTER_PORT)
    number("--ssh_port", "of sshd (default: as ssh is configured)")
    text("--launcher_args", metavar="ARGUMENTS", help=own, default="")
    number("--keep_store", store)
    number("--node_rank", alone, "N")


def check(options: argparse.Namespace, num_ranks: int) -> None:
    """Raise InputError if the options contradict each other; `num_ranks` of each machine."""
    _check_machines(options)
    if num_ranks < 1:
        raise InputError(f"{num_ranks} ranks: expected at least 1")
    if options.max_restarts < 0:
        raise InputError(f"--max_restarts {options.max_restarts}: expected at least 0")
    node_size = options.ranks_per_node
    if node_size is not None and (node_size < 1 or num_ranks % node_size):
        raise InputError(f"--ranks_per_node {node_size}: expected a divisor of {num_ranks} ranks")
    if not options.command:
        raise InputError("no script given: zeropp [options] script.py [arguments of the script]")
    name = options.command[0]
    if options.module and not _can_run_module(name):
        raise InputError(f"no module to run: {name}; expected a name as for python -m")
    if not options.module and not Path(name).is_file():
        raise InputError(f"no such script: {name}")


def require_port(name: str, port: int | None, first: int = 1) -> None:
    """Raise InputError for what is no port."""
    if port is not None and not first <= port <= LAST_PORT:
        raise InputError(f"--{name} {port}: expected a port from {first} to {LAST_PORT}")


def require_cores(num_ranks: int) -> None:
    """Raise InputError if this process may not use a core for each of the ranks."""
    if num_ranks > len(usable_cores()):
        raise InputError(
            f"--bind_cores_to_rank: {num_ranks} ranks need {num_ranks} cores, and this process may "
            f"use {len(usable_cores())}; leave the option out or start fewer ranks"
        )


def _check_machines(options: argparse.Namespace) -> None:
    for name in ("master_port", "ssh_port"):
        require_port(name, getattr(options, name))
    count, number = options.num_nodes, options.node_rank
    if count is not None and count < 1:
        raise InputError(f"--num_nodes {count}: expected at least 1")
    if number is None:
        if count not in (None, 1) and not options.hostfile:
            raise InputError(
                f"--num_nodes {count}: name the machines, by --hostfile FILE with a line HOST "
                f"slots=N for each. Without ssh, run this on each machine, with its N from 0 to "
                f"{count - 1}:\n"
                f"  zeropp --num_nodes {count} --node_rank N --master_addr FIRST_MACHINE "
                f"{' '.join(program(options))}"
            )
        return
    if options.hostfile or options.include or options.exclude:
        raise InputError(
            "--node_rank starts the ranks of this machine only, without --hostfile, --include and "
            "--exclude"
        )
    if count is None or not 0 <= number < count or not options.master_addr:
        raise InputError(
            f"--node_rank {number}: expected --num_nodes N above it, and --master_addr with the "
            "address of the first machine"
        )
    if options.max_restarts:
        raise InputError(
            "--max_restarts with --node_rank would restart one machine alone: use --hostfile, or "
            "torchrun, whose machines agree on it"
        )


def program(options: argparse.Namespace) -> list[str]:
    """Return the script or module with its arguments: the end of the command line of a rank."""
    return ["--module", *options.command] if options.module else options.command


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
