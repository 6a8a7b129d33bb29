"""Without the planner, and without other programs' checkpoints, everything else works."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron_zpp.interchange.foreign_models import llama, saved

ROOT = Path(__file__).resolve().parents[3]
TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 50 --train-iters 2 --log-interval 1 "
    "--eval-iters 0 "
)
# Runs commands one after the other, each a line of words, and prints their statuses.
PROGRAM = """
import sys
# An editable installation finds modules of the working tree for packages of any place.
sys.meta_path = [each for each in sys.meta_path if "__editable__" not in each.__module__]
from megatron_zpp.commands.__main__ import COMMANDS, main
for line in sys.argv[1:]:
    name, *words = line.split()
    if COMMANDS[name].joins_ranks:
        from megatron_zpp.commands.pretrain import main as pretrain
        status = pretrain(words)
    else:
        status = main([name, *words])
    print("status", name, status, flush=True)
"""


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages without what may be left out."""
    folder = tmp_path_factory.mktemp("rest")
    left_out = shutil.ignore_patterns("__pycache__", "planner", "foreign")
    for package in ("zeropp", "megatron_zpp"):
        shutil.copytree(ROOT / package, folder / package, ignore=left_out)
    return folder


@pytest.mark.new_interpreter
def test_what_is_left_out_is_named_where_it_is_needed(rest: Path, tmp_path: Path) -> None:
    model = saved(llama(), tmp_path / "llama")
    lines = [
        f"pretrain {TINY}",
        f"pretrain {TINY} --dry-run",
        "plan --cluster dgx-a100",
        f"convert --from-hf {model} --save {tmp_path}/save",
        f"convert --from-checkpoint {tmp_path}/megatron --save {tmp_path}/other",
        f"convert --load {tmp_path}/save --to-megatron {tmp_path}/out",
    ]
    environment = {**os.environ, "PYTHONPATH": str(rest), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, *lines],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    output = process.stdout + process.stderr
    assert process.returncode == 0, output
    statuses = [line.split()[1:] for line in output.splitlines() if line.startswith("status ")]
    assert statuses == [
        ["pretrain", "0"], ["pretrain", "2"], ["plan", "2"],
        ["convert", "0"], ["convert", "1"], ["convert", "1"],
    ], output  # fmt: skip
    for words in (
        "--dry-run needs megatron_zpp.planner, which is not installed",
        "megatron-zpp plan needs megatron_zpp.planner, which is not installed",
        "--from-checkpoint needs megatron_zpp.interchange.foreign, which is not installed",
        "--to-megatron needs megatron_zpp.interchange.foreign, which is not installed",
    ):
        assert words in output
