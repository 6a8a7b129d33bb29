"""A job on several machines: how it ends on all of them, and what is printed. ssh is a stand-in."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.cluster.network import emulation
from tests.benchmarks.cluster.namespaces import needs_namespaces, wait_until
from tests.launched import ROOT
from zeropp.ranks.launcher import job
from zeropp.ranks.launcher.job import Job

LOCAL_SSH = """#!/bin/sh
echo "$@" >> {folder}/arguments
case "$*" in *-G*) echo "hostname 127.0.0.1"; exit;; esac
for line; do :; done
exec sh -c "$line"
"""
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
folder, action = Path(sys.argv[1]), sys.argv[2]  # and no --local_rank
rank = int(os.environ["RANK"])

def save(number, frame):
    (folder / f"saved{rank}").write_text(signal.Signals(number).name)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "SENT", "FILE",
         "CUDA_VISIBLE_DEVICES")
print(*(f"{name}={os.environ.get(name)}" for name in names), os.getcwd(), flush=True)
(folder / f"started{rank}").touch()
if action == "fail" and rank == 1:
    while not (folder / "started0").exists():
        time.sleep(0.05)
    sys.exit(3)
if action != "end":
    time.sleep(600)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch) -> Callable[..., subprocess.Popen]:
    """Start the launcher on the hostfile with an action of the script; kill it at the end."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("one slots=2\ntwo slots=2\n")
    (tmp_path / "ssh").write_text(LOCAL_SSH.format(folder=tmp_path))
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / ".deepspeed_env").write_text("# variables\nFILE=from a file\n")
    processes = []

    def run(action: str, *options: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen:
        command = [*prefix, sys.executable, "-m", "zeropp.ranks.launcher", "--hostfile", "hosts"]
        command += ["--master_port", str(emulation.free_port()), "--no_local_rank", *options]
        variables = {"PYTHONPATH": str(ROOT), "NCCL_SENT": "", "HOME": str(tmp_path)}
        processes.append(
            subprocess.Popen(
                [*command, "script.py", str(tmp_path), action],
                cwd=tmp_path,
                env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def test_the_ranks_of_all_machines_are_one_job_and_a_failed_one_ends_it(
    start: Callable, tmp_path: Path
) -> None:
    process = start("fail", "--include", "one:1@two:0", "--launcher_args=-i key")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 3, errors
    same = f"GROUP_WORLD_SIZE=2 SENT=None FILE=from a file CUDA_VISIBLE_DEVICES={{}} {tmp_path}"
    assert sorted(output.splitlines()) == [
        f"{host}: RANK={rank} WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 {same.format(gpu)}"
        for rank, (host, gpu) in enumerate((("one", "1"), ("two", None)))
    ]
    said = [line for line in errors.splitlines() if "zeropp: " in line]
    assert "two: zeropp: rank 1 exited with code 3" in said, errors
    assert said[-1] == "zeropp: two failed (exit code 3)"
    assert (tmp_path / "saved0").read_text() == "SIGTERM"
    calls = (tmp_path / "arguments").read_text()
    assert "-i key two cd " in calls and "NCCL_SENT=" in calls and "HOME=" not in calls


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_launcher_ends_the_ranks_which_may_save(
    start: Callable, tmp_path: Path, number: signal.Signals
) -> None:
    process = start("sleep", "--num_ranks", "1")
    wait_until(lambda: len(list(tmp_path.glob("started*"))) == 2, "starting", 120)
    process.send_signal(number)
    wait_until(lambda: len(list(tmp_path.glob("saved*"))) == 2, "saving", 60)
    _, errors = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert process.returncode == 130 and errors.splitlines()[-1] == "zeropp: stopped by SIGINT"


def run_job(**lines: str) -> int:
    before = signal.getsignal(signal.SIGTERM)
    try:
        return Job({host: ["sh", "-c", line] for host, line in lines.items()}).run()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_lines_have_the_name_of_their_machine(capfd: pytest.CaptureFixture) -> None:
    assert run_job(a="echo 1; printf 2", b="echo 3 >&2") == 0
    printed = capfd.readouterr()
    assert printed.out == "a: 1\na: 2\n" and printed.err == "b: 3\n"


@pytest.mark.parametrize(
    ("lines", "code", "named"),
    [
        ({"a": "cat; exit 143", "b": "exit 5"}, 5, "b failed"),
        ({"a": "exit 75", "b": "sleep 0.5; exit 5"}, 5, "b failed"),  # a ended because of b
        ({"a": "exit 75", "b": "cat"}, 75, "a failed"),
        ({"a": "kill -KILL $$", "b": "cat"}, 137, "a failed"),
        ({"a": "cat", "b": "exit 255"}, 255, "b lost the connection to it, or ssh failed"),
    ],
)
def test_the_machine_that_failed_first_is_named(
    lines: dict, code: int, named: str, capfd: pytest.CaptureFixture, monkeypatch
) -> None:
    monkeypatch.setattr(job, "PATIENCE_SECONDS", 2)
    assert run_job(**lines) == code
    assert capfd.readouterr().err == f"zeropp: {named} (exit code {code})\n"


@needs_namespaces
@pytest.mark.skipif(shutil.which("sshd") is None, reason="there is no sshd here")
def test_two_machines_by_ssh(start: Callable, tmp_path: Path) -> None:
    """The first machine starts a rank of its own and one on the second, by its own key."""
    for name in ("key", "host"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name]
        subprocess.run(command, check=True)
    (tmp_path / "sshd_config").write_text(
        f"Port 2222\nHostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/key.pub\n"
        "UsePAM no\nStrictModes no\nPidFile none\n"
    )
    (tmp_path / "ssh").unlink()
    Path("/run/sshd").mkdir(exist_ok=True)  # its folder for privilege separation
    host_key = " ".join((tmp_path / "host.pub").read_text().split()[:2])
    (tmp_path / "known").write_text(f"[{emulation.address(1)}]:2222 {host_key}\n")
    lines = [f"{emulation.address(node)} slots=1\n" for node in range(2)]
    (tmp_path / "hosts").write_text("".join(lines))
    arguments = f"--launcher_args=-i {tmp_path}/key -o UserKnownHostsFile={tmp_path}/known"
    with emulation.emulated_cluster(2):
        sshd = [shutil.which("sshd"), "-D", "-f", str(tmp_path / "sshd_config")]
        subprocess.Popen([*emulation.prefix(1), *sshd])
        process = start("end", "--ssh_port", "2222", arguments, prefix=(*emulation.prefix(0),))
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert sorted(line.split()[:3] for line in output.splitlines()) == [
        [f"{emulation.address(rank)}:", f"RANK={rank}", "WORLD_SIZE=2"] for rank in range(2)
    ]
