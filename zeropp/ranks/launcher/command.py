"""What the command `zeropp` does: ranks of this machine, or a job on several, until they succeed.

Mistakes are said before torch is imported, which takes longer than all else here.
"""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable
from glob import glob
from importlib import import_module
from pathlib import Path

from zeropp.errors import InputError
from zeropp.ranks.addresses import source_towards
from zeropp.ranks.launcher.hostfile import Hosts, choose, first_slots, read_hostfile
from zeropp.ranks.launcher.job import Job
from zeropp.ranks.launcher.options import check, parse, program, require_cores, require_port
from zeropp.ranks.launcher.remote_shell import RemoteShell, is_here, remote_line
from zeropp.ranks.launcher.script_needs import ScriptNeeds
from zeropp.ranks.launcher.signals import StoppedBySignal
from zeropp.ranks.topology import (
    gloo_interfaces,
    share_cores,
    usable_cores,
    use_gpus,
    variables_for_other_machines,
)

USAGE_ERROR = 2  # exit code of a rank that no restart would help
GPUS = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")  # devices of CUDA, ROCm and Windows' Linux
HOST_PROGRAM = "zeropp.ranks.launcher.host_main"
VARIABLES_FILE = ".deepspeed_env"  # in the home folder and in this one, which takes precedence


def main(arguments: list[str] | None = None) -> int:
    """Run a script or module on every rank; return 0, a failed rank's exit code, or 128 + a signal.

    Wrong options print one line `error: ...` and return 2.
    """
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        if options.keep_store is not None:
            require_port("keep_store", options.keep_store, first=0)
            keep_store = import_module("zeropp.capabilities.local_sgd.sync_store").keep_store
            keep_store(options.keep_store, say=lambda text: print(f"zeropp: {text}", flush=True))
            return 0
        hosts = _hosts(options)
        num_ranks = _num_ranks(options, hosts)
        check(options, num_ranks)
        is_job = len(hosts) > 1 or not all(map(is_here, hosts))
        if not is_job:
            share_cores(num_ranks)  # before libraries start threads, which no fork has
        needs = _check_script(options, hosts, num_ranks)
        local = (options, hosts, num_ranks, needs.imports)
        return _run(_job(options, hosts) if is_job else _local(*local), options.max_restarts)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except StoppedBySignal as error:
        return _report_signal(error.number)
    except KeyboardInterrupt:
        return _report_signal(signal.SIGINT)


def _check_script(options: argparse.Namespace, hosts: Hosts, num_ranks: int) -> ScriptNeeds:
    """Let the script check its arguments where it is to run; return what it needs."""
    name, *arguments = options.command
    needs = ScriptNeeds.of(name, is_module=options.module)
    if needs.check is not None and (not hosts or any(map(is_here, hosts))):
        num_machines = len(hosts) or options.num_nodes or 1
        needs.check(arguments, num_ranks * num_machines)
    return needs


def _run(attempt: Callable[[], int], max_restarts: int) -> int:
    """Attempt it until it succeeds or has failed `1 + max_restarts` times; return the status.

    Each attempt has agents of its own, with a new store.
    """
    for restart in range(1, max_restarts + 2):
        status = attempt()
        if status in (0, USAGE_ERROR):
            break
        if restart <= max_restarts:
            print(f"zeropp: restart {restart} of {max_restarts}", file=sys.stderr, flush=True)
    return status


def _hosts(options: argparse.Namespace) -> Hosts:
    """Return the hosts with the slots that are used; empty where neither is given."""
    if options.hostfile is None and not options.include and not options.exclude:
        return {}
    if options.hostfile is None:
        hosts = {"localhost": list(range(_num_gpus()))}
    else:
        hosts = read_hostfile(options.hostfile)
    hosts = choose(hosts, options.include, options.exclude)
    ranks = options.num_gpus if options.num_ranks is None else options.num_ranks
    return first_slots(hosts, options.num_nodes, ranks)


def _num_ranks(options: argparse.Namespace, hosts: Hosts) -> int:
    """Return the number of ranks of a machine; print it if it was not given and there is no GPU."""
    if hosts:
        return len(next(iter(hosts.values())))
    if options.num_ranks is not None:
        return options.num_ranks
    num_gpus = _num_gpus()
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


def _num_gpus() -> int:
    """Return the number of GPUs, for which torch is asked only where there may be any."""
    return import_module("torch").cuda.device_count() if any(map(glob, GPUS)) else 0


def _local(
    options: argparse.Namespace, hosts: Hosts, num_ranks: int, imports: tuple[str, ...]
) -> Callable[[], int]:
    """Return a function that runs the ranks of this machine, maybe as one of several."""
    if options.bind_cores_to_rank:
        require_cores(num_ranks)
    for slots in hosts.values():
        if _are_chosen(slots):
            use_gpus(slots)
    meeting = None
    if options.node_rank is not None:
        place = (options.num_nodes, options.node_rank)
        module = import_module("zeropp.ranks.launcher.meeting_point")
        meeting = module.MeetingPoint(options.master_addr, options.master_port, *place)
        meeting.require_interfaces(gloo_interfaces(meeting.interface()))
    num_cores = len(usable_cores()) // num_ranks if options.bind_cores_to_rank else 0
    ranks = import_module("zeropp.ranks.launcher.local_ranks").LocalRanks(
        program=program(options),
        num_ranks=num_ranks,
        num_cores=num_cores,
        ranks_per_node=options.ranks_per_node,
        imports=imports,
        tells_rank=not options.no_local_rank,
        meeting=meeting,
    )
    return ranks.run


def _job(options: argparse.Namespace, hosts: Hosts) -> Callable[[], int]:
    """Return a function that runs this program on each host, with `--node_rank` of its own."""
    shell = RemoteShell(options.ssh_port, tuple(shlex.split(options.launcher_args)))
    others = [host for host in hosts if not is_here(host)]
    script = None if options.module else options.command[0]
    shell.require_ready(others, os.getcwd(), sys.executable, script)
    variables = variables_for_other_machines() | _file_of_variables()
    address = options.master_addr or _address_of_first(hosts, shell)
    commands = {}
    for node, (host, slots) in enumerate(hosts.items()):
        place = ("--num_nodes", len(hosts), "--node_rank", node)
        place += ("--master_addr", address, "--master_port", options.master_port)
        own = [sys.executable, "-u", "-m", HOST_PROGRAM, *map(str, place)]
        own += [*_rank_options(options, len(slots)), *program(options)]
        given = {**variables}
        if _are_chosen(slots):
            given["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
        line = remote_line(os.getcwd(), given, own)
        commands[host] = shell.command(host, line) if host in others else ["sh", "-c", line]
    return lambda: Job(commands).run()


def _rank_options(options: argparse.Namespace, num_ranks: int) -> list[str]:
    """Return the options about ranks of each host; slots are GPUs where this host has any."""
    on_gpus = options.num_ranks is None and _num_gpus() > 0
    words = ["--num_gpus" if on_gpus else "--num_ranks", str(num_ranks)]
    if options.ranks_per_node is not None:
        words += ["--ranks_per_node", str(options.ranks_per_node)]
    words += ["--bind_cores_to_rank"] * options.bind_cores_to_rank
    return words + ["--no_local_rank"] * options.no_local_rank


def _address_of_first(hosts: Hosts, shell: RemoteShell) -> str:
    """Return the address at which other hosts reach the first one.

    That is where ssh reaches it or, for this machine, where packets to the second one come from.
    """
    first, *rest = hosts
    target = rest[0] if rest and is_here(first) else first
    address = shell.address(target)
    if address is not None and target != first:
        address = source_towards(address)
    if address is None:
        raise InputError(
            f"the address of {target} is not known here: give that of the first machine, {first}, "
            "as the others reach it, by --master_addr"
        )
    return address


def _are_chosen(slots: list[int]) -> bool:
    """Whether --include or --exclude has left out slots before others."""
    return slots != list(range(len(slots)))


def _file_of_variables() -> dict[str, str]:
    """Return the variables of `.deepspeed_env`, which has a line NAME=VALUE for each."""
    variables = {}
    for folder in (Path.home(), Path.cwd()):
        path = folder / VARIABLES_FILE
        lines = path.read_text(errors="surrogateescape").splitlines() if path.is_file() else []
        for number, line in enumerate(lines, start=1):
            name, is_setting, value = line.strip().partition("=")
            if name.startswith("#") or not name:
                continue
            if not is_setting or not name.isidentifier():
                raise InputError(f"{path}, line {number}: {line}: expected NAME=VALUE")
            variables[name] = value
    return variables


def _report_signal(number: int) -> int:
    print(f"zeropp: stopped by {signal.Signals(number).name}", file=sys.stderr)
    return 128 + number
