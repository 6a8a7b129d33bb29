"""Start Python programs by forking a process that has already imported torch.

Importing torch and what comes with it costs about 2.5 CPU seconds, and a run of the tests starts
hundreds of programs that need it. While the tests run (see conftest.py), `subprocess.Popen` forks
a plain `python script ...`, `python -m module ...` or `python -c ...` from a fork server;
everything else starts as usual. The program sees its own arguments, environment, folder, standard
streams and `sys.path`, and is a child of the process that started it, as with `subprocess`. It has
a fork server of its own, forked before it begins, so that a launcher's ranks are forked too.

Differences from a new interpreter: `sys.modules` has third-party modules, and this project's if
the program would import them from this clone; `/proc/PID/cmdline` and `/proc/PID/environ` are
those of the server, and the interpreter is not torn down at the end. Tests that are about any of
this are marked `@pytest.mark.new_interpreter`.

If the imports start threads, as those of a torch with CUDA do, nothing can be forked from what they
leave: then every program starts in a new interpreter.
"""

import array
import atexit
import ctypes
import functools
import gc
import importlib.util
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.forked_program import Program, become, run

NO_FORKS = "TESTS_WITHOUT_FORKS"  # set for a session and its workers once imports start threads
AVAILABLE = sys.platform == "linux"  # elsewhere no process can adopt another's child
PRELOADED = (
    "torch", "torch._dynamo", "torch._inductor", "torch.distributed.checkpoint",
    "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.run",
    "torch.nn.attention.varlen", "torch.utils.tensorboard", "numpy", "safetensors", "rich.console",
    "rich.progress", "rich.table", "tokenizers", "pytest", "transformers.modeling_utils", "peft",
)  # fmt: skip
OWN = (  # of this project: they cost a program that imports them 0.3 s
    "megatron_zpp.commands.generate_text", "megatron_zpp.commands.preprocess_data",
    "megatron_zpp.commands.pretrain", "zeropp.deepspeed", "zeropp.ranks.launcher",
)  # fmt: skip
RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
ROOT = Path(__file__).resolve().parent.parent
MESSAGE_BYTES = 1 << 20
READY, THREADS = b"ready", b"threads"  # a server's first message
MOST_DESCRIPTORS = 16
SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
IN_NETWORK = ["ip", "netns", "exec"]  # and a name
FORKED = {"PYTHONPATH", "PYTHONUNBUFFERED"}  # variables that take effect in a forked process too
ENV = "/usr/bin/env"
# A forked program that imports this file, as a worker of pytest does, has been patched already.
new_process = inspect.unwrap(subprocess.Popen._execute_child)
SIGNATURE = inspect.signature(new_process)
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
PLAIN = {  # what a forked program can have of `Popen.__init__`'s arguments
    "preexec_fn": None, "executable": None, "shell": False, "umask": -1, "close_fds": True,
    "uid": None, "gid": None, "gids": None, "process_group": -1,
}  # fmt: skip


class Client:
    """A process's connection to its fork server, which is started when it is first needed."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self.connection = connection
        self.lock = threading.Lock()
        self.owner = os.getpid()

    def start(self, program: Program, descriptors: Sequence[int]) -> int | None:
        """Start a program with these open files; return the process id of this process's child.

        Return None if nothing can be forked here.
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        with self.lock, _adopting():
            if NO_FORKS not in os.environ and self.connection is None:
                self.connection = _start_server()
            if self.connection is None:
                return None
            self.connection.sendmsg([pickle.dumps(vars(program))], rights)
            reply = self.connection.recv(64)
        if not reply:
            raise RuntimeError("the fork server has ended; see its error message above")
        return int(reply)


class Starter:
    """Takes the place of `subprocess.Popen._execute_child`, which starts the new process."""

    def __init__(self) -> None:
        self.client: Client | None = None  # None: every program starts in a new interpreter

    def install(self, client: Client) -> None:
        """Fork Python programs of this process from now on."""
        self.client = client

        @functools.wraps(new_process)
        def execute_child(process: subprocess.Popen, *values: object) -> None:
            self.execute_child(process, *values)

        execute_child.starter = self
        subprocess.Popen._execute_child = execute_child

    @contextmanager
    def new_interpreters(self) -> Iterator[None]:
        """Fork no program in the meantime."""
        client, self.client = self.client, None
        try:
            yield
        finally:
            self.client = client

    def execute_child(self, process: subprocess.Popen, *values: object) -> None:
        """Start what `Popen.__init__` was asked for; the values are its pipes and settings."""
        names = SIGNATURE.bind(process, *values).arguments
        program = None
        if self.client is not None and self.client.owner == os.getpid():
            program = _program(names)
        if program is None:
            new_process(process, *values)
            return
        pipes = (names["p2cread"], names["c2pwrite"], names["errwrite"])
        streams = [standard if pipe == -1 else pipe for standard, pipe in enumerate(pipes)]
        pid = self.client.start(program, [*streams, *program.descriptors[3:]])
        if pid is None:
            new_process(process, *values)
            return
        process.pid = pid
        process._child_created = True
        process._close_pipe_fds(*(names[name] for name in PIPES))


starter = getattr(subprocess.Popen._execute_child, "starter", None) or Starter()


def _program(names: Mapping[str, object]) -> Program | None:
    """The program to fork, or None where only a new process does what was asked for."""
    if any(names.get(name, value) != value for name, value in PLAIN.items()):
        return None
    if isinstance(names["args"], (str, bytes, os.PathLike)):
        return None
    words = [os.fsdecode(word) for word in names["args"]]
    environment = dict(os.environ if names["env"] is None else names["env"])
    folder = os.path.abspath(names["cwd"] or os.getcwd())
    network = None
    if words[:3] == IN_NETWORK:
        network, words = words[3], words[4:]
    if words[0] == ENV:
        while "=" in words[1]:
            name, _, environment[name] = words.pop(1).partition("=")
        words.pop(0)
    unbuffered = words[1:2] == ["-u"]
    arguments = words[2:] if unbuffered else words[1:]
    is_python = words[0] == sys.executable and _is_plain(arguments, environment)
    if not is_python or not os.path.isdir(folder):
        return None
    return Program(
        arguments=tuple(arguments),
        unbuffered=unbuffered or bool(environment.get("PYTHONUNBUFFERED")),
        environment=environment,
        folder=folder,
        network=network,
        new_session=names["start_new_session"],
        ignored_signals=tuple(filter(_is_ignored, signal.valid_signals())),
        descriptors=(0, 1, 2, *sorted(names["pass_fds"])),
    )


def _start_server() -> socket.socket | None:
    """Return the connection to a new fork server, once it can fork; None if it never can."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with starter.new_interpreters():
        server = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT)
    theirs.close()
    reply = ours.recv(64)
    if reply == THREADS:
        ours.close()
        server.wait()
        os.environ[NO_FORKS] = "1"
        return None
    if reply != READY:
        raise RuntimeError("the fork server did not start; see its error message above")
    atexit.register(_end, server, ours)
    return ours


def _end(server: subprocess.Popen, connection: socket.socket) -> None:
    connection.close()
    server.wait()


def _is_plain(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a forked process can stand for `python *arguments` in this environment."""
    settings = {name for name in environment if name.startswith("PYTHON")}
    same = all(environment[name] == os.environ.get(name) for name in settings - FORKED)
    if not same or not arguments:
        return False
    return arguments[0] in ("-m", "-c") or not arguments[0].startswith("-")


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN


@contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of descendants whose own parent ends meanwhile."""
    prctl = ctypes.CDLL(None).prctl
    prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def serve(connection: socket.socket) -> Program:
    """Fork a child for each program that is asked for; return its program, in the child only."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the programs
    while True:
        size = socket.CMSG_LEN(MOST_DESCRIPTORS * array.array("i").itemsize)
        message, rights, _, _ = connection.recvmsg(MESSAGE_BYTES, size)
        if not message:
            os._exit(0)
        program = Program(**pickle.loads(message))
        descriptors = array.array("i")
        for _, _, data in rights:
            descriptors.frombytes(data)
        pid = _fork_orphan(program.new_session)
        if pid == 0:
            connection.close()
            _place(dict(zip(program.descriptors, descriptors, strict=True)))
            return program
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(b"%d" % pid)


def _fork_orphan(new_session: bool) -> int:
    """Fork twice; return the grandchild's process id, and 0 in it once its parent has ended."""
    numbers, gate = os.pipe(), os.pipe()
    middle = os.fork()
    if middle == 0:
        if os.fork():
            os._exit(0)
        if new_session:
            os.setsid()
        os.write(numbers[1], b"%d" % os.getpid())
        os.close(gate[1])
        os.read(gate[0], 1)  # returns when the server has closed the other end
        pid, still_open = 0, (*numbers, gate[0])
    else:
        os.waitpid(middle, 0)
        pid, still_open = int(os.read(numbers[0], 64)), (*numbers, *gate)
    for descriptor in still_open:
        os.close(descriptor)
    return pid


def _place(descriptors: dict[int, int]) -> None:
    """Give open files (values) the numbers that the program expects (keys)."""
    above = 1 + max(*descriptors.keys(), *descriptors.values())
    moved = {}
    for number, descriptor in descriptors.items():
        moved[number] = above + len(moved)
        os.dup2(descriptor, moved[number])
    for descriptor in descriptors.values():
        os.close(descriptor)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
        os.close(descriptor)


def main(connection: socket.socket) -> None:
    """Be a fork server; in its children, be their programs.

    A program has a fork server of its own, forked before it begins. A rank has none: it starts no
    Python programs, and what counts the processes of a node expects only ranks.
    """
    is_program = False
    while not is_program:
        program = serve(connection)
        become(program)
        if "RANK" in program.environment:
            break
        ours, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        is_program = os.fork() != 0
        if is_program:
            connection.close()
            starter.install(Client(ours))
        else:
            ours.close()
    run(program)


def _end_if_threads(connection: socket.socket) -> None:
    """End this server if it has a second thread, which its forks would lose."""
    if len(os.listdir("/proc/self/task")) > 1:
        connection.send(THREADS)
        os._exit(0)


if __name__ == "__main__":
    to_client = socket.socket(fileno=int(sys.argv[1]))
    for name in (*PRELOADED, *OWN):
        _end_if_threads(to_client)
        if importlib.util.find_spec(name.partition(".")[0]):  # not all are installed
            importlib.import_module(name)
    for name in ("tests", "tests.forked_program"):
        del sys.modules[name]
    sys.path.remove(str(ROOT))
    rendezvous = importlib.import_module(RENDEZVOUS)  # its own reads all frames' sources: 0.6 s
    rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    for finalizer in weakref.finalize._registry:  # of torch's operators: 35 ms in each program
        finalizer.atexit = False
    gc.collect()
    gc.freeze()
    _end_if_threads(to_client)
    to_client.send(READY)
    main(to_client)
