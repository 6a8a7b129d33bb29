"""The launcher starts the ranks and ends with one line, an exit code and no orphaned process."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zeropp.ranks.launcher import main
from zeropp.ranks.launcher.failed_rank import EndedRank, report_failure
from zeropp.ranks.topology import usable_cores

ROOT = Path(__file__).resolve().parents[4]
START_SECONDS = 90  # importing torch in the launcher and its ranks, on a busy machine
END_SECONDS = 60  # what is promised after a rank has died
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="tests a machine without a GPU")

FORKED = 'ZEROPP = {"imports": ["colorsys"]}'  # which no program here imports by itself
# Each rank writes its process id, then performs the action that the test chooses.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
said, folder, action = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
rank = int(os.environ["RANK"])

def save(number, frame):
    time.sleep(0.5)
    (folder / f"saved{rank}").write_text(signal.Signals(number).name)
    sys.exit(0)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, save if action == "wait" else signal.SIG_DFL)
(folder / f"part{rank}").write_text(str(os.getpid()))
(folder / f"part{rank}").rename(folder / f"pid{rank}")
if action == "show":
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    place = " ".join(f"{name}={os.environ[name]}" for name in names)
    place += f" cores={sorted(os.sched_getaffinity(0))} forked={'colorsys' in sys.modules}"
    os.write(1, f"{place} {__name__} {said} {sys.argv[4:]} {sys.path[0]}\\n".encode())
    sys.exit(0)
if action == "exit" and rank == 1:
    while not (folder / "pid0").exists():  # rank 0 must not be ended before it has written it
        time.sleep(0.05)
    print("error: no such corpus", file=sys.stderr)
    sys.exit(3)
if action.startswith("fail"):
    codes = action.removeprefix("fail").split(",")
    attempt = len(list(folder.glob("attempt*")))
    if rank == 1:
        (folder / f"attempt{attempt}").touch()
        sys.exit(int(codes[attempt]))
    sys.exit(0)
if action == "follow" and rank == 0:
    while not (folder / "pid1").exists():
        time.sleep(0.05)
    process = Path("/proc") / (folder / "pid1").read_text() / "stat"
    while process.exists() and ") Z" not in process.read_text():
        pass
    sys.exit(5)
time.sleep(600)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen]:
    """Start the launcher on the script with an action; kill what still runs at the end."""
    processes = []

    def run(
        action: str,
        *options: str,
        script: str = str(tmp_path / "script.py"),
        arguments: tuple[str, ...] = (),
        folder: Path = ROOT,
        forked: bool = False,
    ) -> subprocess.Popen:
        (tmp_path / "script.py").write_text(SCRIPT + FORKED * forked)
        command = [script, str(tmp_path), action, *arguments]
        # Ignored signals are inherited, and shells ignore SIGINT in background jobs.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(
            [sys.executable, "-m", "zeropp.ranks.launcher", *options, *command],
            cwd=folder,
            env={
                **{k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"},
                "PYTHONPATH": str(ROOT),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        signal.signal(signal.SIGINT, handler)
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()
    for path in tmp_path.glob("pid*"):
        if is_alive(int(path.read_text())):
            os.kill(int(path.read_text()), signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} took more than {seconds} s"
        time.sleep(0.05)


def pids(folder: Path, count: int) -> list[int]:
    """The process ids of the ranks, once all of them run."""
    paths = [folder / f"pid{rank}" for rank in range(count)]
    wait_for(lambda: all(path.exists() for path in paths), START_SECONDS, "starting")
    return [int(path.read_text()) for path in paths]


def last_lines(process: subprocess.Popen) -> list[str]:
    _, errors = process.communicate(timeout=END_SECONDS)
    assert "Traceback" not in errors, errors
    assert "torch" not in errors, errors
    return errors.splitlines()


@pytest.mark.new_interpreter
@pytest.mark.parametrize("forked", [False, pytest.param(True, marks=ON_CPU)])
def test_every_rank_runs_the_script_as_python_would(
    forked: bool, start: Callable, tmp_path: Path
) -> None:
    options = ("--num_nodes", "1", "--num_ranks", "4", "--ranks_per_node", "2")
    words = ("--num-layers", "2", "--num_ranks")
    process = start("show", *options, arguments=words, forked=forked)
    output, errors = process.communicate(timeout=START_SECONDS)
    assert (process.returncode, errors) == (0, "")
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    assert sorted(output.splitlines()) == [
        f"RANK={rank} WORLD_SIZE=4 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=2 OMP_NUM_THREADS={threads} "
        f"cores={usable_cores()} forked={forked} __main__ --local_rank={rank} {list(words)} "
        f"{tmp_path}"
        for rank in range(4)
    ]


def test_every_rank_runs_a_module_as_python_would(start: Callable, tmp_path: Path) -> None:
    package = tmp_path / "work" / "folder" / "inner"
    package.mkdir(parents=True)  # namespace packages, without __init__.py
    (package / "module.py").write_text(SCRIPT)
    process = start(
        "show",
        *("--num_ranks", "2", "--module"),
        script="folder.inner.module",
        arguments=("--module", "x"),
        folder=tmp_path / "work",
    )
    output, errors = process.communicate(timeout=START_SECONDS)
    assert (process.returncode, errors) == (0, "")
    lines = sorted(output.splitlines())
    assert [line.split()[0] for line in lines] == ["RANK=0", "RANK=1"]
    for rank, line in enumerate(lines):
        arguments = f"--local_rank={rank} ['--module', 'x']"
        assert line.endswith(f" __main__ {arguments} {tmp_path / 'work'}")


def test_ranks_are_pinned_to_their_own_cores_on_request(start: Callable) -> None:
    count = min(2, len(usable_cores()))
    process = start("show", "--num_ranks", str(count), "--bind_cores_to_rank")
    output, errors = process.communicate(timeout=START_SECONDS)
    assert (process.returncode, errors) == (0, "")
    share = len(usable_cores()) // count
    for rank, line in enumerate(sorted(output.splitlines())):
        assert f"cores={usable_cores()[rank * share : (rank + 1) * share]} " in line


def test_a_rank_that_exits_ends_the_others_and_is_named(start: Callable, tmp_path: Path) -> None:
    process = start("exit", "--num_ranks", "2", forked=True)
    running = pids(tmp_path, 2)
    assert last_lines(process) == ["error: no such corpus", "zeropp: rank 1 exited with code 3"]
    assert process.returncode == 3
    assert not any(is_alive(pid) for pid in running)


def test_a_killed_rank_ends_the_others_and_is_named(start: Callable, tmp_path: Path) -> None:
    process = start("sleep", "--num_ranks", "3", forked=True)
    running = pids(tmp_path, 3)
    os.kill(running[2], signal.SIGKILL)
    lines = last_lines(process)
    assert len(lines) == 1 and lines[0].startswith("zeropp: rank 2 was killed by SIGKILL")
    assert process.returncode == 128 + signal.SIGKILL
    assert not any(is_alive(pid) for pid in running)


@pytest.mark.parametrize(
    ("codes", "status", "lines"),
    [
        ("3,0", 0, ["rank 1 exited with code 3", "restart 1 of 2"]),
        ("3,4,5", 5, ["rank 1 exited with code 3", "restart 1 of 2", "rank 1 exited with code 4",
                      "restart 2 of 2", "rank 1 exited with code 5"]),
        ("2", 2, ["rank 1 exited with code 2"]),  # a wrong command line stays wrong
    ],
)  # fmt: skip
def test_failed_ranks_are_restarted_as_often_as_asked(
    start: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codes: str,
    status: int,
    lines: list[str],
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    process = start(f"fail{codes}", "--num_ranks", "2", "--max_restarts", "2")
    assert last_lines(process) == [f"zeropp: {line}" for line in lines]
    assert process.returncode == status
    assert len(list(tmp_path.glob("attempt*"))) == codes.count(",") + 1
    assert not list(temporary.iterdir())


def test_a_terminated_rank_is_named_although_another_one_follows_at_once(
    start: Callable, tmp_path: Path
) -> None:
    process = start("follow", "--num_ranks", "2")
    running = pids(tmp_path, 2)
    os.kill(running[1], signal.SIGTERM)
    assert last_lines(process) == ["zeropp: rank 1 was killed by SIGTERM"]
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("codes", "seconds", "line"),
    [
        ((1, 3, -15), (5.2, 5.1, 6), "rank 1 exited with code 3"),
        ((-15, 1, 143), (5.2, 5.3, 6), "rank 0 was killed by SIGTERM"),
        ((1, -11, -15), (5.1, 5.3, 6), "rank 1 was killed by SIGSEGV"),  # reported late
        ((1, -6, -15), (5.1, 5.3, 6), "rank 0 exited with code 1"),  # aborts when it hears of it
        ((3, 1, -9), (5.2, 5.1, 36), "rank 1 exited with code 1"),  # the agent lost patience
        ((75, -15, 1), (5.1, 5.2, 5.3), "rank 2 exited with code 1"),
        ((75, -9, 75), (5.1, 35, 5.2), "rank 1 did not respond and was ended with SIGKILL"),
        ((3, -15, 75), (5.1, 5.1, 5.1), "rank 0 exited with code 3"),
    ],
)
def test_the_rank_that_really_failed_is_named(codes, seconds, line, capsys) -> None:
    code = report_failure(dict(enumerate(map(EndedRank, codes, seconds))))
    assert capsys.readouterr().err == f"zeropp: {line}\n"
    named = codes[int(line.split()[1])]
    assert code == (named if named > 0 else 128 - named)


@pytest.mark.parametrize(("number", "forked"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_signals_reach_the_ranks_which_may_save(
    start: Callable, tmp_path: Path, number: signal.Signals, forked: bool
) -> None:
    process = start("wait", "--num_ranks", "2", forked=forked)
    running = pids(tmp_path, 2)
    process.send_signal(number)
    assert last_lines(process) == [f"zeropp: stopped by {number.name}"]
    assert process.returncode == 128 + number
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == [number.name] * 2
    assert not any(is_alive(pid) for pid in running)


def test_under_nohup_ranks_go_on_when_the_terminal_is_closed(
    start: Callable, tmp_path: Path
) -> None:
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which programs inherit
    process = start("wait", "--num_ranks", "2", forked=True)
    signal.signal(signal.SIGHUP, handler)
    running = pids(tmp_path, 2)
    for pid in (process.pid, *running):
        os.kill(pid, signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert last_lines(process) == ["zeropp: stopped by SIGTERM"]
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["SIGTERM"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals when a parent ends")
def test_ranks_do_not_outlive_a_launcher_that_is_killed(start: Callable, tmp_path: Path) -> None:
    process = start("wait", "--num_ranks", "2", forked=True)
    running = pids(tmp_path, 2)
    process.kill()
    wait_for(lambda: not any(is_alive(pid) for pid in running), END_SECONDS, "ending")
    assert (tmp_path / "saved0").read_text() == "SIGTERM"


FIRST, SECOND = (
    f"--num_ranks 1 --num_nodes 2 --node_rank {rank} --master_addr" for rank in range(2)
)
MISTAKES = (
    ("--num_ranks 1", "no script given"),
    ("--num_ranks 1 none.py", "no such script: none.py"),
    ("--num_ranks 1 -m none.py", "no module to run: none.py; expected a name as"),
    ("--num_ranks 1 -m zeropp.none", "no module to run: zeropp.none;"),
    ("--num_ranks 1 -m zeropp", "no module to run: zeropp;"),  # no __main__.py
    ("--num_ranks 1 -m no_package.none", "no module to run: no_package.none;"),
    ("--num_ranks 0 {script}", "0 ranks: expected at least 1"),
    ("--num_ranks 4 --ranks_per_node 3 {script}", "a divisor of 4 ranks"),
    ("--num_ranks 4096 --bind_cores_to_rank {script}", "4096 ranks need 4096 cores"),
    ("--num_ranks 1 --max_restarts -1 {script}", "-1: expected at least 0"),
    ("--num_ranks 1 --hostfiles h", "unknown option --hostfiles"),
    ("--hostfile none {script}", "--hostfile none: No such file .* worker-1 slots=8$"),
    ("--num_nodes 2 --num_ranks 1 {script} -x", "--hostfile FILE .*\n.* -x$"),
    ("--num_nodes 2 -m json.tool -x", "--node_rank N .* --module json.tool -x$"),
    ("--num_ranks 1 --node_rank 0 {script}", "expected --num_nodes N above it"),
    ("--node_rank 0 --hostfile {hosts} {script}", "of this machine only"),
    ("--num_ranks 1 --ssh_port 70000 {script}", "a port from 1 to 65535"),
    (f"{SECOND} a --max_restarts 1 {{script}}", "would restart one machine alone"),
    (f"{SECOND} no.invalid {{script}}", "does not know the name --master_addr no.invalid"),
    (
        f"{FIRST} 192.0.2.1 {{script}}",
        "--master_addr 192.0.2.1 is no address of the first machine",
    ),
)


@pytest.mark.parametrize(("words", "said"), MISTAKES)
def test_mistakes_are_explained(
    words: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # groups of earlier tests set it
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(0)")
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    given = {"script": script, "hosts": tmp_path / "hosts"}
    assert main([word.format(**given) for word in words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and re.search(said, error.strip(), re.DOTALL), error


@ON_CPU
def test_asking_for_more_gpus_than_there_are_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(0)")
    assert main(["--num_gpus", "4", str(script)]) == 2
    assert "this machine has 0; --num_ranks 4 starts" in capsys.readouterr().err


@ON_CPU
def test_without_a_count_one_rank_runs_and_a_line_says_so(start: Callable) -> None:
    process = start("show")
    output, errors = process.communicate(timeout=START_SECONDS)
    notice, shown = output.splitlines()
    assert notice == "zeropp: no GPU here: 1 rank on the CPU (--num_ranks N starts more)"
    assert "WORLD_SIZE=1" in shown and errors == ""
