"""What flags, commands and functions refuse: each message names the culprit and says what to do.

`tests/data/refused_calls.tsv` has a call, its arguments, the files that it meets, where FOLDER is a
folder of the test's own, and words of the error, with " ... " between them;
`tests/data/refused_commands.tsv` has commands, their exit status and their files, Latin-1.
"""

import json
from importlib import import_module
from pathlib import Path

import pytest

from megatron_zpp.checkpoint.pretrained_model import with_initial_model
from megatron_zpp.commands.__main__ import COMMANDS
from megatron_zpp.data.blend import parse_blend
from megatron_zpp.data.instructions.examples import read_examples
from megatron_zpp.data.text_source import with_named_paths
from megatron_zpp.interchange.open_model import open_model
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import (
    BatchConfig,
    Config,
    DataConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron_zpp.settings.data import names_examples
from megatron_zpp.settings.gpt.layer_pattern import marks_of, parse_window
from megatron_zpp.text.generate import Request, stream
from megatron_zpp.text.perplexity import measure_perplexity
from megatron_zpp.text.sampling import Sampling
from megatron_zpp.tokenizer import build_tokenizer
from megatron_zpp.tokenizer.base import NullTokenizer
from tests.launched import ROOT
from tests.megatron_zpp.model.small import GPT2, VOCABULARY, build
from tests.megatron_zpp.settings.command_lines import error_of
from tests.megatron_zpp.settings.tables import rows
from tests.megatron_zpp.text.peaked_model import peaked_model
from tests.megatron_zpp.text.text_models import save_text_model
from zeropp.errors import InputError


def ask_for(prompt: tuple = (1,), sampling: dict | None = None, **fields: object) -> None:
    """Ask for a text before anything runs."""
    request = Request(prompt=prompt, sampling=Sampling(**(sampling or {})), **fields)
    stream(build(GPT2), NullTokenizer(VOCABULARY), [request])


def schedules(**fields: object) -> None:
    """The values of a run of ten iterations of four samples."""
    schedule, sizes = ScheduleConfig(**fields), BatchConfig(micro_batch_size=1, global_batch_size=4)
    _ = Config(batch=sizes, training=TrainingConfig(train_iters=10), schedule=schedule).schedules


CALLS = {
    "tokenizer": lambda **fields: build_tokenizer(TokenizerConfig(**fields)),
    "generate": ask_for,
    "blend": parse_blend,
    "paths": lambda **fields: with_named_paths(DataConfig(**fields)),
    "examples": lambda paths: list(read_examples(paths)),
    "are examples": lambda **fields: names_examples(DataConfig(**fields)),
    "layers": lambda text: marks_of(text, 4, "--flag"),
    "window": parse_window,
    "schedule": schedules,
    "perplexity": lambda **asked: measure_perplexity(peaked_model(), **asked),
    "initial model": lambda flags: with_initial_model(parse(flags.split(), 1), open_model),
}


@pytest.mark.parametrize(
    "row", rows("refused_calls.tsv"), ids=lambda row: f"{row['call']}: {row['words'][:60]}"
)
def test_what_is_refused_is_named(row: dict[str, str], tmp_path: Path) -> None:
    for name, content in json.loads(row["files"] or "{}").items():
        (tmp_path / name).write_text(content)
    arguments = json.loads(row["arguments"].replace("FOLDER", str(tmp_path)))
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}
    with pytest.raises(InputError) as caught:
        CALLS[row["call"]](**arguments)
    message = str(caught.value)
    for words in row["words"].replace("FOLDER", str(tmp_path)).split(" ... "):
        assert words.strip() in message


BESIDE_COMMANDS = {
    "plan": "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --bf16 "
    "--tokenizer-type NullTokenizer --vocab-size 255 --hidden-dropout 0 --attention-dropout 0 ",
    "dump-samples": "--data-path ROOT/tests/data/a_text_document --split 1 --seq-length 4 "
    "--tokenizer-type NullTokenizer --vocab-size 50257 --data-cache-path cache "
    "--output samples.npz ",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a checkpoint of a model of bytes."""
    folder = tmp_path_factory.mktemp("model")
    save_text_model(folder)
    return str(folder)


@pytest.mark.parametrize(
    "row", rows("refused_commands.tsv"), ids=lambda row: f"{row['command']} {row['arguments'][:80]}"
)
def test_commands_say_in_one_line_what_to_do(row, model, tmp_path, capsys, monkeypatch):
    """They write nothing. ROOT is the clone, MODEL a checkpoint, the folder the test's own."""
    files = json.loads(row["files"] or "{}")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    words = BESIDE_COMMANDS.get(row["command"], "") + row["arguments"]
    words = words.replace("ROOT", str(ROOT)).replace("MODEL", model).split()
    program = f"megatron-zpp {row['command']}"
    status = import_module(COMMANDS[row["command"]].module).main(words, program)
    assert status == int(row["status"])
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert all(part in error for part in row["words"].split(" ... "))
    assert {path.name for path in tmp_path.iterdir()} <= {*files, "cache"}


BESIDE_FLAGS = {
    "": "",
    "experts": "--num-experts 8 --disable-bias-linear ",
    "latent": "--mock-data --multi-latent-attention ",
    "pipeline": "--pipeline-model-parallel-size 4 ",
    "tiny": "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 50 --make-vocab-size-divisible-by 8 ",
}


@pytest.mark.parametrize("row", rows("refusals.tsv"), ids=lambda row: row["flags"][:60])
def test_flags_that_are_refused_are_named(row: dict[str, str], tmp_path: Path) -> None:
    """Where a JSON contradicts flags, the message names its file too."""
    file = json.loads(row["json"]) if row["json"] else None
    message = error_of(
        BESIDE_FLAGS[row["beside"]] + row["flags"], int(row["ranks"]), file, tmp_path
    )
    for words in row["words"].split(" ... "):
        assert words in message
    assert "contradict" not in message or file is None or "ds.json" in message


def test_all_mistakes_of_a_command_line_are_reported_at_once() -> None:
    first, *mistakes = error_of("--vocab-fil 2 --lr fast --seed 1 --hidden-sise").splitlines()
    assert first == "3 mistakes in the command line:" and len(mistakes) == 3
    assert mistakes[0].startswith("  unknown flag --vocab-fil; ")
    assert mistakes[1].startswith("  --lr fast: expected a number")
    assert mistakes[2].startswith("  unknown flag --hidden-sise; ")
