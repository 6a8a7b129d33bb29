"""The server as a program: it starts, answers, shares weights between ranks, and ends when told."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason='pip install "megatron-zpp[serve]"')
pytest.importorskip("uvicorn", reason='pip install "megatron-zpp[serve]"')

from megatron_zpp.text.generate import Request, complete  # noqa: E402
from megatron_zpp.text.sampling import Sampling  # noqa: E402
from megatron_zpp.tokenizer.byte_level import ByteLevelTokenizer  # noqa: E402
from tests.launched import ROOT, kill_all, start, wait_for, zeropp  # noqa: E402
from tests.megatron_zpp.text.text_models import save_text_model  # noqa: E402
from tools.serve import main  # noqa: E402

SCRIPT = str(ROOT / "tools/serve.py")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator:
    """Start a server; returns it, its log and its port. What is left of it is killed."""
    processes = []

    def run(command: list[str]) -> tuple[subprocess.Popen, Path, int]:
        log = tmp_path / "log"
        processes.append(start(command, log, tmp_path))
        wait_for("serving saved at http://127.0.0.1:", log, processes[-1])
        return processes[-1], log, int(re.findall(r"at http://[^:]+:(\d+)", log.read_text())[0])

    yield run
    for process in processes:
        if process.poll() is None:
            kill_all(process)


@pytest.mark.parametrize(("num_ranks", "end"), [(1, signal.SIGTERM), (2, signal.SIGINT)])
def test_it_answers_until_it_is_told_to_end(
    num_ranks: int, end: signal.Signals, launch, tmp_path: Path
) -> None:
    """In the middle of a long text, too: its client is told, and all ranks end in peace."""
    model = save_text_model(tmp_path / "saved", positions=4096)
    flags = f"--load {tmp_path}/saved --port 0"
    alone = [sys.executable, SCRIPT, *flags.split()]
    process, log, port = launch(alone if num_ranks == 1 else zeropp(2, "tools/serve.py", flags))
    asked = {"prompt": "ab", "max_tokens": 8, "seed": 3}
    status, text = ask(port, asked)
    request = Request(prompt=tuple(b"ab"), max_new_tokens=8, sampling=Sampling(seed=3))
    expected = complete(model, ByteLevelTokenizer(), [request])[0]
    assert status == 200 and json.loads(text)["choices"][0]["text"] == expected
    assert ask(port, {"prompt": "a" * 5000})[0] == 400
    assert ask(port, asked)[0] == 200
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    long = {"prompt": "ab", "max_tokens": 4000, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(long))
    response = connection.getresponse()
    assert response.read(6) == b"data: "
    process.send_signal(end)
    assert b"the server is ending" in response.read().split(b"\n\n")[-2]
    connection.close()
    process.wait(30)
    assert "Traceback" not in log.read_text() and "error" not in log.read_text().lower()


def ask(port: int, content: dict) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(content))
    response = connection.getresponse()
    status, text = response.status, response.read()
    connection.close()
    return status, text


def test_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save_text_model(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--load", str(tmp_path), "--port", port]) == 1
    assert f"error: cannot listen at --host 127.0.0.1 --port {port}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--load is missing"),
        (["--load", "nowhere"], "nowhere"),
        (["--port", "70000"], "--port 70000: expected at most 65535"),
        (["--porte", "8000"], "did you mean --port?"),
    ],
)
def test_mistakes(flags: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    assert main(flags) == 1
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ")


def test_without_its_packages_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['starlette'] = None\n"
        "from tools.serve import main; sys.exit(main(['--load', 'x']))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        'error: the server needs the package starlette: pip install "megatron-zpp[serve]"\n'
    )


def test_help(capsys: pytest.CaptureFixture) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--load", "--port", "--max-waiting", "--dtype"))
