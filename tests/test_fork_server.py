"""Forked programs are what new interpreters would be, and children of the test's process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fork_server
from tests.launched import ROOT

pytestmark = pytest.mark.skipif(not fork_server.AVAILABLE, reason="only Linux has subreapers")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
FORKED = "test_open_files_keep_their_numbers"  # which is skipped where nothing can be forked
START_A_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
"""
# What a program sees of itself, as JSON.
SHOW = """
import json, os, signal, sys
print(json.dumps({
    "arguments": sys.argv, "path": sys.path[0], "name": __name__, "folder": os.getcwd(),
    "variable": os.environ.get("VARIABLE"), "parent": os.getppid(), "input": sys.stdin.read(),
    "session": os.getsid(0) == os.getpid(), "torch": "torch" in sys.modules,
    "pipe": signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN,
}))
print("done", file=sys.stderr)
"""


@pytest.fixture(autouse=True)
def needs_forks(request: pytest.FixtureRequest) -> None:
    """Skip where importing torch starts a thread, unless the test is marked to fork nothing."""
    subprocess.run([sys.executable, "-c", ""], check=True)
    if fork_server.NO_FORKS in os.environ and not request.node.get_closest_marker(
        "new_interpreter"
    ):
        pytest.skip("importing torch starts a thread here")


def show(command: list[str], folder: Path, **settings: object) -> dict:
    done = subprocess.run(
        [sys.executable, *command], input="text", capture_output=True, text=True, cwd=folder,
        env={**os.environ, "VARIABLE": "value"}, **settings,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "done\n")
    return json.loads(done.stdout)


@pytest.mark.parametrize("new_session", [False, True])
@pytest.mark.parametrize("kind", ["script", "-m", "-c"])
def test_a_program_sees_what_it_would_see_in_a_new_interpreter(kind, new_session, tmp_path):
    (tmp_path / "program.py").write_text(SHOW)
    words = {
        "script": [str(tmp_path / "program.py")], "-m": ["-m", "program"], "-c": ["-c", SHOW],
    }[kind]  # fmt: skip
    command = [*words, "a", "--b"]
    forked = show(command, tmp_path, start_new_session=new_session)
    with fork_server.starter.new_interpreters():
        expected = show(command, tmp_path, start_new_session=new_session)
    assert forked.pop("torch") and not expected.pop("torch")
    assert forked == expected
    assert forked["parent"] == os.getpid() and forked["variable"] == "value"


@pytest.mark.new_interpreter
def test_a_marked_test_forks_nothing() -> None:
    code = "import sys; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


@pytest.mark.new_interpreter
def test_programs_ranks_and_workers_start_anew_where_imports_start_threads(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(START_A_THREAD)  # in every new interpreter
    kept = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    tests = ["tests/test_ranks.py::test_processes_are_reused_and_clean", f"{__file__}::{FORKED}"]
    done = subprocess.run(
        [*PYTEST, "-n", "1", *tests], capture_output=True, text=True,
        cwd=ROOT, env={**kept, "PYTHONPATH": path},
    )  # fmt: skip
    assert "1 passed, 1 skipped" in done.stdout and (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("raise SystemExit", 0, ""),
        ("raise ValueError('no')", 1, "ValueError: no\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import atexit; atexit.register(print, 'end', flush=True)", 0, ""),
    ],
)
def test_how_a_program_ends(code: str, status: int, message: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == status and done.stderr.endswith(message)
    assert done.stdout == ("end\n" if "atexit" in code else "")


def test_a_signal_ends_a_program_and_a_started_program_forks_too() -> None:
    child = "import sys; print('torch' in sys.modules, flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "True\n"
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == -signal.SIGTERM


def test_a_program_that_imports_the_fork_server_goes_on_with_its_own() -> None:
    code = "from tests import conftest, fork_server; print(fork_server.starter.client.connection)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert "socket" in shown  # of a server that runs; a new client starts one when it needs it


def test_open_files_keep_their_numbers() -> None:
    numbers = os.pipe()
    code = "import os, sys; os.write(int(sys.argv[1]), b'through')"
    process = subprocess.Popen([sys.executable, "-c", code, str(numbers[1])], pass_fds=[numbers[1]])
    os.close(numbers[1])
    assert process.wait() == 0
    with open(numbers[0], "rb") as pipe:
        assert pipe.read() == b"through"


@pytest.mark.parametrize("has_another", [False, True])
def test_a_program_has_this_clones_modules_if_it_would_import_them(has_another, tmp_path) -> None:
    code = "import sys; print('zeropp.deepspeed' in sys.modules); import zeropp; print(zeropp.name)"
    if has_another:
        (tmp_path / "zeropp.py").write_text("name = 'another'")
    else:
        code = code.replace("zeropp.name", "zeropp.__file__")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path if has_another else ROOT)}
    command = [sys.executable, "-c", code]
    shown = subprocess.check_output(command, env=environment, cwd=tmp_path, text=True)
    expected = "False\nanother\n" if has_another else f"True\n{ROOT}/zeropp/__init__.py\n"
    assert shown == expected


@pytest.mark.parametrize(
    "settings",
    [{"shell": True}, {"preexec_fn": os.getpid}, {"env": {**os.environ, "PYTHONHASHSEED": "0"}}],
    ids=lambda settings: next(iter(settings)),
)
def test_what_cannot_be_forked_starts_anew(settings: dict) -> None:
    code = "import sys; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    if "shell" in settings:
        command = f'"{sys.executable}" -c "{code}"'
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, **settings)
    assert done.stdout == "False\n"
