"""A file among the capabilities is all that one needs: everything else is a loop over them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import ROOT, TORCHRUN, launching

SCRIPT = Path(__file__).parent / "run_with_echo.py"
FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 50 --micro-batch-size 1 --global-batch-size 2 "
    "--lr 1e-3 --eval-iters 0 --log-interval 1 --log-format megatron --zero-stage 1 "
    "--save saved --load saved --tensorboard-dir curves "
)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a dry run, a run and a resumed run with a flag of `one_more/echo.py` print."""
    folder = tmp_path_factory.mktemp("echo")
    runs = {
        "dry": "--train-iters 2 --echo-bytes 4096 --dry-run",
        "first": "--train-iters 2 --echo-bytes 4096",
        "resumed": "--train-iters 3 --override-opt_param-scheduler --echo-bytes 8192",
    }
    texts = {}
    with launching(folder) as launch:
        for name, flags in runs.items():
            process, log = launch(
                [*TORCHRUN, "--nproc-per-node", "2", str(SCRIPT), *(FLAGS + flags).split()]
            )
            assert process.wait(timeout=120) == 0, log.read_text()
            texts[name] = log.read_text()
    texts["record"] = (folder / "curves" / "run.json").read_text()
    return texts


def test_it_is_in_the_help() -> None:
    command = [sys.executable, str(SCRIPT), "--help", "echo"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    text = subprocess.run(command, capture_output=True, text=True, env=environment).stdout
    assert "--echo-bytes" in text


def test_it_is_in_the_dry_run(logs: dict[str, str]) -> None:
    assert "4096 bytes a step, after 0 steps" in logs["dry"]
    assert "what comes back" in logs["dry"]
    assert any(
        line.split()[:2] == ["│", "echo"] or "echo" in line.split()
        for line in logs["dry"].splitlines()
    )


def test_what_it_sends_is_in_the_forecast_the_ledger_and_the_log(logs: dict[str, str]) -> None:
    lines = [line for line in logs["first"].splitlines() if "comm per node and step" in line]
    assert len(lines) == 2 and all("| echo: 0.00 |" in line for line in lines)
    forecast = json.loads(logs["record"])["forecast"]
    assert forecast["echo_in_node"] == 2 * 8192


def test_a_resumed_run_has_its_state_and_says_what_has_changed(logs: dict[str, str]) -> None:
    assert "8192 bytes a step, after 2 steps" in logs["resumed"]
    assert "echo: 4096 bytes in the checkpoint: this changes the updates" in logs["resumed"]
