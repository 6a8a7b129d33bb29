"""tools/evaluate.py: perplexity of checkpoints and of Hugging Face folders, and tasks."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron_zpp.commands.evaluate import TASK_SECTIONS, main
from megatron_zpp.interchange.open_model import load_model
from megatron_zpp.settings.command_line import split_flags, vocabulary
from megatron_zpp.settings.config import TokenizerConfig
from tests.launched import ROOT, zeropp
from tests.megatron_zpp.interchange.foreign_models import add_tokenizer, llama, save_own, saved
from tests.megatron_zpp.text.peaked_model import log_probabilities, peaked_config

# The command without lm-eval's own tasks, whose 14,000 files take 10 s to read.
OWN_TASKS_ONLY = """
import sys
from functools import partialmethod
from lm_eval.tasks import TaskManager
from megatron_zpp.commands.evaluate import main
TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)
sys.exit(main(sys.argv[1:]))
"""
BYTES = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> str:
    save, _ = save_own(peaked_config(), tmp_path_factory.mktemp("save"), BYTES)
    return str(save)


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text("the cat sat on the mat")
    return str(tmp_path / "a.txt")


def test_table_and_json(checkpoints: str, text: str, tmp_path: Path, capsys) -> None:
    output = tmp_path / "results.json"
    flags = ["--load", checkpoints, "--data-path", text, "--json"]
    assert main([*flags, str(output)]) == 0
    table = capsys.readouterr().out
    assert main([*flags, "-"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results == json.loads(output.read_text())
    (row,) = results["perplexity"]
    assert row["perplexity"] == math.exp(row["loss"]) and row["tokens"] == 21
    assert results["seq_length"] == 32
    assert f"{row['perplexity']:.4f} on {text}" in table


@pytest.mark.parametrize("opens", [False, True])
def test_a_hugging_face_folder(opens: bool, tmp_path: Path, capsys) -> None:
    """Its loss is that of transformers, whose logits differ by 1e-5 from ours (test_convert_hf)."""
    theirs = llama()
    folder = saved(theirs, tmp_path / "llama")
    add_tokenizer(folder, opens=opens)
    (tmp_path / "a.txt").write_text("the cat sat on mat and a dog ran to it")
    flags = ["--data-path", str(tmp_path / "a.txt"), "--json", "-"]
    assert main(["--load", str(folder), *flags]) == 0
    row = json.loads(capsys.readouterr().out)["perplexity"][0]
    ids = torch.arange(0 if opens else 1, 12)[None]  # the words of the tokenizer, in order
    with torch.no_grad():
        logits = theirs(ids[:, :-1]).logits[0]
    assert row["loss"] == pytest.approx(F.cross_entropy(logits, ids[0, 1:]).item(), abs=2e-5)


def test_files_before_an_unreadable_one_are_reported(
    checkpoints: str, text: str, tmp_path: Path, capsys
) -> None:
    (tmp_path / "bad.jsonl").write_text("{")
    flags = ["--data-path", text, str(tmp_path / "bad.jsonl")]
    output = tmp_path / "results.json"
    assert main(["--load", checkpoints, *flags, "--json", str(output)]) == 1
    captured = capsys.readouterr()
    assert f"on {text}" in captured.out and "bad.jsonl, line 1: not JSON" in captured.err
    assert len(json.loads(output.read_text())["perplexity"]) == 1


def test_lm_eval_is_named_where_it_is_missing(checkpoints: str, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["--load", checkpoints, "--tasks", "a"]) == 1
    assert "--tasks needs the package lm_eval: pip install lm_eval" in capsys.readouterr().err


def test_flags_are_ours_or_those_of_lm_eval() -> None:
    words = "--load x -t a b --dtype=bf16 --num_fewshot 2 --seq_length 9 --batch_size 8 --limit 3"
    assert split_flags(words.split(), vocabulary(TASK_SECTIONS), short=True) == (
        ["--load", "x", "--dtype=bf16", "--seq_length", "9"],
        ["-t", "a", "b", "--num_fewshot", "2", "--batch_size", "8", "--limit", "3"],
    )


QUESTIONS = (
    {"question": "ab", "choices": ["c", "de"], "answer": 0},
    {"question": "the cat", "choices": ["sat", "ran", "it"], "answer": 2},
    {"question": "x", "choices": ["y", "z"], "answer": 1},
)
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{more}
"""
KINDS = {
    "multiple_choice": """
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "generate_until": """
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["never"], max_gen_toks: 5}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


def write_tasks(folder: Path) -> str:
    """Files of two tasks for lm-eval, which needs no network for them; returns their names."""
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    for kind, more in KINDS.items():
        content = TASK.format(name=f"own_{kind}", data=folder / "data.jsonl", kind=kind, more=more)
        (folder / f"{kind}.yaml").write_text(content)
    return ",".join(f"own_{kind}" for kind in KINDS)


def test_tasks(tmp_path: Path) -> None:
    """The harness's own command line, on ranks that share the weights.

    The logged log-probabilities are those of plain arithmetic, and the table is printed once.
    """
    pytest.importorskip("lm_eval", reason='pip install "megatron-zpp[eval]"')
    save, _ = save_own(peaked_config(), tmp_path / "save", BYTES)
    model, _ = load_model(save)
    flags = (
        f"--load {save} --tasks {write_tasks(tmp_path)} --include_path {tmp_path} "
        f"--batch_size 2 --log_samples --output_path {tmp_path}/results"
    )
    process = evaluate_offline(flags, tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("|own_multiple_choice|") == 1
    samples = read_samples(tmp_path / "results", "own_multiple_choice")
    assert len(samples) == 3
    for sample, row in zip(samples, QUESTIONS, strict=True):
        sums = []
        for choice in row["choices"]:
            ids = [*f"{row['question']} {choice}".encode()]
            values, _ = log_probabilities(model, ids, len(row["question"]))
            sums.append(sum(values))
        logged = [float(answer[0][0]) for answer in sample["resps"]]
        assert logged == pytest.approx(sums, rel=1e-5)
        assert sample["acc"] == (sums.index(max(sums)) == row["answer"])
    texts = [sample["resps"][0][0] for sample in read_samples(tmp_path / "results", "own_generate")]
    assert len(texts) == 3 and all(texts)


def test_an_unknown_task_ends_all_ranks(checkpoints: str, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason='pip install "megatron-zpp[eval]"')
    flags = f"--load {checkpoints} --tasks no_such_task"
    process = evaluate_offline(flags, tmp_path)
    assert process.returncode != 0
    assert re.search("no_such_task", process.stdout + process.stderr)


def evaluate_offline(flags: str, folder: Path) -> subprocess.CompletedProcess:
    program = folder / "evaluate.py"
    program.write_text(OWN_TASKS_ONLY)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
    }  # fmt: skip
    return subprocess.run(
        zeropp(2, str(program), flags),
        capture_output=True,
        text=True,
        timeout=150,
        env=environment,
        cwd=folder,
    )


def read_samples(folder: Path, task: str) -> list[dict]:
    """What lm-eval logged of a task, in the order of the data."""
    (file,) = folder.rglob(f"samples_{task}*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(rows, key=lambda row: row["doc_id"])
