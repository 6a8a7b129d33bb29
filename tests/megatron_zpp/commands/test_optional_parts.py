"""Without the rooms that may be left out everything else works; text needs no slow package."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_zpp.interchange.conversion import import_model
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
from importlib import import_module
# An editable installation finds modules of the working tree for packages of any place.
sys.meta_path = [each for each in sys.meta_path if "__editable__" not in each.__module__]
from megatron_zpp.commands.__main__ import COMMANDS, main
for line in sys.argv[1:]:
    name, *words = line.split()
    if COMMANDS[name].joins_ranks:
        module = "pretrain_gpt" if name == "pretrain" else COMMANDS[name].module
        status = import_module(module).main(words)
    else:
        status = main([name, *words])
    print("status", name, status, flush=True)
"""


def run_without(
    rooms: tuple[str, ...], folder: Path, lines: list[str]
) -> tuple[list[list[str]], str]:
    """Run commands with copies of the packages that lack rooms; return statuses and output."""
    left_out = shutil.ignore_patterns(*rooms)
    for package in ("zeropp", "megatron_zpp"):
        shutil.copytree(ROOT / package, folder / "rest" / package, ignore=left_out)
    shutil.copy(ROOT / "pretrain_gpt.py", folder / "rest")
    environment = {**os.environ, "PYTHONPATH": str(folder / "rest"), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, *lines],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    output = process.stdout + process.stderr
    assert process.returncode == 0, output
    statuses = [line.split()[1:] for line in output.splitlines() if line.startswith("status ")]
    return statuses, output


@pytest.mark.new_interpreter
def test_what_is_left_out_is_named_where_it_is_needed(tmp_path: Path) -> None:
    model = saved(llama(), tmp_path / "llama")
    lines = [
        f"pretrain {TINY}",
        f"pretrain {TINY} --dry-run",
        "plan --cluster dgx-a100",
        f"convert --from-hf {model} --save {tmp_path}/save",
        f"convert --from-checkpoint {tmp_path}/megatron --save {tmp_path}/other",
        f"convert --load {tmp_path}/save --to-megatron {tmp_path}/out",
    ]
    statuses, output = run_without(("planner", "foreign"), tmp_path, lines)
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


@pytest.mark.new_interpreter
def test_without_interchange_our_own_models_are_trained_and_read(tmp_path: Path) -> None:
    """Also a base of adapters that was imported before; models of others are refused."""
    model, save, lora = (tmp_path / name for name in ("llama", "save", "lora"))
    import_model(saved(llama(), model), tmp_path / "imported")
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18"}\n' * 9)
    tune = TINY.replace("--mock-data", f"--data-path {text}") + "--lora-rank 2 --split 1,0,0 "
    tune = tune.replace("--vocab-size 50", "--vocab-size 101")
    lines = [
        f"pretrain {TINY} --save {save} --sample-prompt 5",
        f"pretrain {TINY} --load {save} --finetune",
        f"pretrain {tune} --pretrained-checkpoint {tmp_path}/imported --save {lora}",
        f"pretrain {tune} --pretrained-checkpoint {tmp_path}/imported --dry-run",
        f"generate --load {save} --prompt 5 --max-new-tokens 3",
        f"generate --load {lora} --prompt 5 --max-new-tokens 3",
        f"pretrain {tune} --pretrained-checkpoint {model}",
        f"generate --load {model} --prompt 5",
        f"convert --load {save} --to-hf {tmp_path}/out",
    ]
    statuses, output = run_without(("interchange",), tmp_path, lines)
    assert [status for _, status in statuses] == list("000000112"), output
    sentence = (
        f"error: {model}: expected a folder of checkpoints (iter_0000100 in it); models of other "
        "programs are read by megatron_zpp.interchange, which is not installed"
    )
    assert " ".join(output.split()).count(sentence) == 2, output
    assert "convert needs megatron_zpp.interchange, which is not installed" in output


pytestmark = pytest.mark.new_interpreter

FILES = Path(__file__).resolve().parents[2] / "data" / "gpt2_part"
SLOW = {"torch", "transformers", "pandas", "matplotlib"}
BPE = ("--vocab-file", FILES / "vocab.json", "--merge-file", FILES / "merges.txt")
RUN = """
import sys
from megatron_zpp.commands.__main__ import main
status = main(sys.argv[1:])
print(*{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
sys.exit(status)
"""


def imported(command: str, arguments: Sequence[object]) -> set[str]:
    """The packages that a run of the command has imported."""
    words = [sys.executable, "-c", RUN, command, *map(str, arguments)]
    process = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr
    return set(process.stderr.strip().split("\n")[-1].split())


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A dataset written by `preprocess`, which must not import a slow package either."""
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": "a line"}) + "\n")
    arguments = ("--input", source, "--output-prefix", tmp_path / "x", *BPE, "--workers", 2)
    assert not imported("preprocess", arguments) & SLOW
    return tmp_path / "x_text_document"


@pytest.mark.new_interpreter
def test_merging_and_inspecting_a_dataset(dataset: Path, tmp_path: Path) -> None:
    arguments = ("--input", dataset, dataset, "--output-prefix", tmp_path / "both")
    assert not imported("merge", arguments) & SLOW
    arguments = ("--input", tmp_path / "both", "--histogram", tmp_path / "lengths.png", *BPE)
    assert not imported("inspect", arguments) & SLOW
