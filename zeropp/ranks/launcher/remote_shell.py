"""How a command is run on another machine, by ssh, and what is said if that is not possible."""

import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from zeropp.errors import InputError, first_lines
from zeropp.ranks.addresses import is_own, resolve

CONNECT_SECONDS, ANSWER_SECONDS = 10, 40  # for a connection, for logging in and the first answer
OPTIONS = (  # never ask; notice a machine that is gone
    *("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)
NO_FOLDER, NO_PYTHON, NO_SCRIPT = (f"zeropp: no {what}" for what in ("folder", "python", "script"))
ADVICE = MappingProxyType(
    {  # what ssh says -> what to do
        r"not resolve|name or service not known": "correct the name in the hostfile, or give the "
        "machine's address",
        r"host key verification|host identification": "it is not the machine that ssh knows by "
        "that name, or ssh does not know it yet: run `{ssh}` once by hand and compare its key",
        r"permission denied|authentication": "it accepts none of your keys: run "
        "`{copy}` once, or name the key by --launcher_args='-i KEY'",
        r"connection refused": "nothing listens there: start sshd on that machine, or give its "
        "port by --ssh_port",
        r"timed out|no route|unreachable|did not answer": "is it on, is that its address, and "
        "does a firewall let ssh pass?",
    }
)


@dataclass(frozen=True)
class RemoteShell:
    """ssh to a port (None: as it is configured), with further arguments."""

    port: int | None = None
    arguments: tuple[str, ...] = ()

    def command(self, host: str, line: str) -> list[str]:
        """Return the command that runs a line of shell on `host`."""
        return ["ssh", *OPTIONS, *self._own(), host, line]

    def address(self, host: str) -> str | None:
        """Return the address at which ssh reaches a host; None if its name is unknown here."""
        found = _run(["ssh", "-G", *self._own(), host]).stdout
        name = re.search(r"^hostname (\S+)$", found, re.MULTILINE)
        return resolve(name[1] if name else host)

    def require_ready(
        self, hosts: Sequence[str], folder: str, python: str, script: str | None
    ) -> None:
        """Raise InputError unless each host can be reached and has the folder and both files."""
        with ThreadPoolExecutor(max_workers=len(hosts)) as threads:
            problems = threads.map(lambda host: self._problem(host, folder, python, script), hosts)
            found = [problem for problem in problems if problem]
        if found:
            raise InputError(first_lines(found))

    def _problem(self, host: str, folder: str, python: str, script: str | None) -> str:
        missing = {
            NO_FOLDER: ("-d", folder, "no folder"),
            NO_PYTHON: ("-x", python, "no Python at"),
            NO_SCRIPT: ("-f", str(Path(folder, script or folder)), "no script"),
        }
        if script is None:  # a module, which that machine's Python finds or not
            del missing[NO_SCRIPT]
        line = "; ".join(
            f"test {flag} {shlex.quote(path)} || echo {shlex.quote(mark)}"
            for mark, (flag, path, _) in missing.items()
        )
        done = _run(self.command(host, line))
        if done.returncode != 0:
            return f"{host} cannot be reached: {self._complaint(host, done.stderr)}"
        printed = done.stdout.splitlines()
        for mark, (_, path, text) in missing.items():
            if mark in printed:
                return (
                    f"{host} has {text} {path}: every machine needs the clone, its .venv and the "
                    "script at the same path, on a shared file system or as copies"
                )
        return ""

    def _complaint(self, host: str, said: str) -> str:
        """Return the last line of what ssh said, and what to do."""
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        last = lines[-1].rstrip(".") if lines else "ssh says nothing"
        own = shlex.join(self._own())
        by_hand = " ".join(filter(None, ("ssh", own, host)))
        copy = " ".join(filter(None, ("ssh-copy-id", own, host)))
        for pattern, advice in ADVICE.items():
            if re.search(pattern, said, re.IGNORECASE):
                return f"{last}; {advice.format(ssh=by_hand, copy=copy)}"
        return f"{last}; try `{by_hand}` by hand"

    def _own(self) -> list[str]:
        port = [] if self.port is None else ["-p", str(self.port)]
        return [*port, *self.arguments]


def is_here(host: str) -> bool:
    """Return whether a host of the hostfile is this machine, which needs no ssh."""
    if host in ("localhost", socket.gethostname()):
        return True
    address = resolve(host)
    return address is not None and is_own(address)


def remote_line(folder: str, variables: Mapping[str, str], command: Sequence[str]) -> str:
    """Return the line of shell that runs a command in a folder with variables, without a fork."""
    settings = [f"{name}={value}" for name, value in variables.items()]
    return f"cd {shlex.quote(folder)} && exec {shlex.join(['/usr/bin/env', *settings, *command])}"


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        return subprocess.run(command, timeout=ANSWER_SECONDS, **options)
    except FileNotFoundError as error:
        raise InputError("there is no program ssh here: install OpenSSH's client") from error
    except subprocess.TimeoutExpired:
        said = f"it did not answer within {ANSWER_SECONDS} s"
        return subprocess.CompletedProcess(command, 255, "", said)
