"""The machines of a job and their slots: DeepSpeed's hostfile, --include and --exclude.

    # a comment
    worker-1 slots=8
    worker-2 slots=8

A slot is a place for a rank: a GPU, or on machines without GPUs any number. Slots count from 0.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from zeropp.errors import InputError, first_few

LINE = re.compile(r"([^\s#-]\S*)\s+slots=([1-9]\d*)")
EXAMPLE = "worker-1 slots=8"

Hosts = Mapping[str, list[int]]  # host -> the numbers of its slots, in the order of the file


def read_hostfile(path: str) -> Hosts:
    """Return all hosts with all their slots; raises InputError, which names the line."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is not UTF-8 text")
        raise InputError(
            f"--hostfile {path}: {reason}; expected a file with a line for each machine, "
            f"as in: {EXAMPLE}"
        ) from error
    hosts: dict[str, list[int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = LINE.fullmatch(words)
        if match is None:
            raise InputError(
                f"{path}, line {number}: {words}: expected HOST slots=N, as in: {EXAMPLE}"
            )
        if match[1] in hosts:
            raise InputError(f"{path}, line {number}: {match[1]} is there twice")
        hosts[match[1]] = list(range(int(match[2])))
    if not hosts:
        raise InputError(f"{path} names no machine; expected lines as: {EXAMPLE}")
    return hosts


def choose(hosts: Hosts, include: str, exclude: str) -> Hosts:
    """Return the hosts and slots that --include names, or those that --exclude does not name.

    Both have the format HOST[:SLOT,SLOT...][@HOST...]; without slots all of the host are meant.
    """
    if include and exclude:
        raise InputError(f"--include {include} and --exclude {exclude}: expected one of them")
    option = "--include" if include else "--exclude"
    named = _named(option, include or exclude, hosts)
    if include:
        return named
    left = {
        host: [slot for slot in slots if slot not in named.get(host, ())]
        for host, slots in hosts.items()
    }
    left = {host: slots for host, slots in left.items() if slots}
    if not left:
        raise InputError(f"--exclude {exclude}: no machine is left")
    return left


def first_slots(hosts: Hosts, num_nodes: int | None, ranks: int | None) -> Hosts:
    """Return the first `num_nodes` hosts, each with its first `ranks` slots; None: all.

    Raises InputError if there are fewer, or if the hosts then have different numbers of slots.
    """
    if num_nodes is not None and num_nodes > len(hosts):
        raise InputError(f"--num_nodes {num_nodes}: there are {len(hosts)}, {_list(hosts)}")
    names = list(hosts)[:num_nodes]
    for name in names:
        if ranks is not None and ranks > len(hosts[name]):
            raise InputError(
                f"{ranks} ranks on each machine, but {name} has {_slots(hosts[name])}: change the "
                "hostfile or the number"
            )
    chosen = {name: hosts[name][:ranks] for name in names}
    sizes = {name: len(slots) for name, slots in chosen.items()}
    if len(set(sizes.values())) > 1:
        few, many = min(sizes, key=sizes.get), max(sizes, key=sizes.get)
        raise InputError(
            f"{few} has {_slots(chosen[few])} and {many} {_slots(chosen[many])}, but all machines "
            f"of a job have the same number of ranks: --num_gpus {sizes[few]} (or --num_ranks) "
            "takes that many of each"
        )
    return chosen


def _named(option: str, text: str, hosts: Hosts) -> dict[str, list[int]]:
    """Return the hosts and slots that an option names, in the order of `hosts`."""
    named: dict[str, list[int]] = {}
    for part in text.split("@") if text else ():
        host, has_slots, numbers = part.partition(":")
        if host not in hosts:
            raise InputError(f"{option} {text}: no machine {host!r} among {_list(hosts)}")
        slots = numbers.split(",") if has_slots else [str(slot) for slot in hosts[host]]
        wrong = [slot for slot in slots if slot not in map(str, hosts[host])]
        if wrong:
            raise InputError(
                f"{option} {text}: {host} has no slot {wrong[0]}; it has {_slots(hosts[host])}, "
                "which count from 0"
            )
        named[host] = sorted({*named.get(host, ()), *map(int, slots)})
    return {host: named[host] for host in hosts if host in named}


def _list(hosts: Hosts) -> str:
    return first_few(list(hosts))


def _slots(slots: list[int]) -> str:
    return f"{len(slots)} slot{'s' if len(slots) != 1 else ''}"
