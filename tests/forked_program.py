"""What a process forked by `fork_server.py` does to be a Python program that was asked for."""

import atexit
import ctypes
import importlib.util
import io
import os
import runpy
import signal
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SET_NAME = 15  # PR_SET_NAME of linux/prctl.h
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h
PACKAGES = ("megatron_zpp", "zeropp")  # that the fork server has imported from this clone


@dataclass(frozen=True)
class Program:
    """A command after `python`, and what the process that runs it inherits."""

    arguments: tuple[str, ...]
    unbuffered: bool
    environment: Mapping[str, str]
    folder: str
    network: str | None  # the network namespace, where it is another one
    new_session: bool
    ignored_signals: tuple[int, ...]
    descriptors: tuple[int, ...]  # their numbers in the program; the first are 0, 1 and 2


def become(program: Program) -> None:
    """Make this forked process what a new interpreter would be for the program."""
    if program.network is not None:
        with open(f"/run/netns/{program.network}") as network:
            if ctypes.CDLL(None).setns(network.fileno(), NEW_NETWORK):
                raise OSError(f"cannot enter the network namespace {program.network}")
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        ignored = number in program.ignored_signals or number == signal.SIGPIPE
        signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    if signal.SIGINT not in program.ignored_signals:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    path = [entry for entry in sys.path if entry not in _python_path()]
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.folder)
    sys.path[:] = [*_python_path(), *path]
    _open_streams(program.unbuffered)
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if "RANK" in os.environ:
        name = f"rank {os.environ['RANK']}".encode()
        ctypes.CDLL(None).prctl(SET_NAME, name, 0, 0, 0)


def _python_path() -> list[str]:
    value = os.environ.get("PYTHONPATH", "")
    return [os.path.abspath(entry) for entry in value.split(os.pathsep)] if value else []


def _open_streams(unbuffered: bool) -> None:
    buffering = 0 if unbuffered else -1
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False))
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = io.TextIOWrapper(
            open(descriptor, "wb", buffering, closefd=False),
            errors="backslashreplace" if name == "stderr" else "strict",
            line_buffering=name == "stderr" or os.isatty(descriptor),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.__stdin__ = sys.stdin


def run(program: Program) -> None:
    """Run the program as `__main__`, then end this process with its exit status."""
    try:
        _main(program.arguments)
        status = 0
    except SystemExit as end:
        status = _status(end.code)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = 120  # as the interpreter does where its output cannot be written
    os._exit(status)


def _main(arguments: Sequence[str]) -> None:
    kind, *rest = arguments
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    first = {"-m": os.getcwd(), "-c": ""}.get(kind, os.path.dirname(os.path.realpath(kind)))
    sys.path.insert(0, first)
    _forget_what_is_elsewhere()
    if kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.modules.pop(rest[0], None)  # else runpy warns that it is imported already
        runpy._run_module_as_main(rest[0])
        return
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv = [kind, *rest]
        module.__file__ = kind
        with io.open_code(kind) as file:
            code = compile(file.read(), kind, "exec")
    exec(code, module.__dict__)


def _forget_what_is_elsewhere() -> None:
    """Forget the modules of packages that this program would import from other folders, or not."""
    for package in PACKAGES:
        names = [name for name in sys.modules if name.partition(".")[0] == package]
        modules = {name: sys.modules.pop(name) for name in names}
        spec = importlib.util.find_spec(package)
        if modules and spec is not None:  # a folder may be a link to it
            if os.path.realpath(spec.origin) == os.path.realpath(modules[package].__file__):
                sys.modules.update(modules)


def _status(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1
