"""tools/generate.py: prompts from flags, files and standard input; several ranks."""

import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_zpp.commands.generate_text import UNPRINTABLE, main
from megatron_zpp.model.gpt import GPT
from megatron_zpp.text.generate import Request, complete
from megatron_zpp.text.sampling import Sampling
from megatron_zpp.tokenizer.base import ByteLevelTokenizer
from tests.launched import ROOT, start, wait_for, zeropp
from tests.megatron_zpp.interchange.foreign_models import WORDS, add_tokenizer, llama
from tests.megatron_zpp.interchange.foreign_models import saved as saved_in
from tests.megatron_zpp.text.text_models import save_text_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GPT]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, save_text_model(folder)


def text_of(model: GPT, prompt: str, count: int, **settings: object) -> str:
    request = Request(
        prompt=tuple(prompt.encode()), max_new_tokens=count,
        sampling=Sampling(**{"temperature": 0.8, **settings}),
    )  # fmt: skip
    return complete(model, ByteLevelTokenizer(), [request])[0]


def test_prompts_of_the_command_line(
    saved: tuple[Path, GPT], capsys: pytest.CaptureFixture
) -> None:
    """In their order, however they end; each text has a seed of its own."""
    folder, model = saved
    flags = ["--prompt", "ab", "hello", "--samples", "2", "--max-new-tokens", "9", "--seed", "5"]
    more = ["--top-k", "50", "--top-p", "0.9", "--temperature", "0.7", "--batch-size", "3"]
    assert main(["--load", str(folder), *flags, *more]) == 0
    captured = capsys.readouterr()
    settings = {"top_k": 50, "top_p": 0.9, "temperature": 0.7}
    expected = [
        prompt + text_of(model, prompt, 9, seed=5 + number, **settings)
        for number, prompt in enumerate(["ab", "ab", "hello", "hello"])
    ]
    assert captured.out == "".join(text + "\n" for text in expected)
    assert captured.err.count(" tokens, ") == 2


def test_a_file_of_prompts_and_a_file_of_texts(
    saved: tuple[Path, GPT], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One a line, or in .jsonl where a prompt may have several lines."""
    folder, model = saved
    prompts = ["ab", "x\ny", "é"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    (tmp_path / "p.txt").write_text("ab\nhello\n")
    for name, expected in [("p.jsonl", prompts), ("p.txt", ["ab", "hello"])]:
        output = tmp_path / "out.jsonl"
        flags = ["--input", str(tmp_path / name), "--output", str(output)]
        assert main(["--load", str(folder), *flags, "--max-new-tokens", "5"]) == 0
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        assert rows == [
            {"prompt": p, "text": text_of(model, p, 5, seed=number), "finish": "length"}
            for number, p in enumerate(expected)
        ]


def test_standard_input_is_a_prompt_or_one_a_line(saved, monkeypatch, capsys):
    folder, model = saved
    for more, text, prompts in (([], "two\nlines", ["two\nlines"]),
                                (["--input", "-"], "ab\ncd\n", ["ab", "cd"])):  # fmt: skip
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert main(["--load", str(folder), "--max-new-tokens", "5", *more]) == 0
        expected = [each + text_of(model, each, 5, seed=n) for n, each in enumerate(prompts)]
        assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["--load", "nowhere"]) == 1
    assert capsys.readouterr().err.startswith("error: there is no prompt: give --prompt TEXT")


def test_prompts_that_no_table_can_hold_are_refused(saved, tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": 1%s}' % ("0" * 5000))
    for flags, message in (
        (["--input", str(path)], "p.jsonl, line 1: not JSON"),
        (["--prompt", "a\udcff"], "--prompt: 'a\\udcff' is not UTF-8 text"),
    ):
        assert main(["--load", str(saved[0]), *flags]) == 1
        assert message in capsys.readouterr().err


def test_on_ranks_with_sharded_weights(saved: tuple[Path, GPT], tmp_path: Path) -> None:
    """Two ranks print what one does, once."""
    folder, model = saved
    flags = f"--load {folder} --prompt ab hello --max-new-tokens 6"
    process = start(zeropp(2, "tools/generate.py", flags), tmp_path / "log", tmp_path)
    assert process.wait(120) == 0, (tmp_path / "log").read_text()
    text = (tmp_path / "log").read_text()
    for number, prompt in enumerate(["ab", "hello"]):
        assert text.count(prompt + text_of(model, prompt, 6, seed=number) + "\n") == 1


def test_stop_texts_and_tokens(saved: tuple[Path, GPT], capsys: pytest.CaptureFixture) -> None:
    folder, model = saved
    whole = text_of(model, "ab", 30)
    stop = next(c for c in whole[4:] if c.isascii() and c.isprintable() and c not in whole[:4])
    for flags in (["--stop", "nothing", stop], ["--stop-token", "255", str(ord(stop))]):
        assert main(["--load", str(folder), "--prompt", "ab", *flags]) == 0
        assert capsys.readouterr().out == "ab" + whole[: whole.index(stop)] + "\n"


@pytest.mark.parametrize("opens", [False, True])
def test_the_text_of_transformers(
    opens: bool, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Of tokenizers, too, that put begin of sentence before a text."""
    theirs = llama(vocab_size=len(WORDS))
    folder = saved_in(theirs, tmp_path / "llama")
    add_tokenizer(folder, opens=opens)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("the cat sat", return_tensors="pt")["input_ids"]
    assert ids.shape[1] == 3 + opens
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    drawn = theirs.generate(ids, **settings)[0, ids.shape[1] :]
    flags = ["--prompt", "the cat sat", "--temperature", "0", "--max-new-tokens", "20"]
    assert main(["--load", str(folder), *flags]) == 0
    words = [WORDS[token] for token in drawn if token]
    assert words and capsys.readouterr().out.split() == ["the", "cat", "sat", *words]


def test_lines_end_where_new_lines_are(
    saved: tuple[Path, GPT], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """JSON keeps U+2028 and U+0085 as they are; a form feed ends a page, not a line."""
    folder, model = saved
    odd = "a\u2028b\x85c"
    content = json.dumps({"prompt": odd}, ensure_ascii=False)
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + content.encode())
    (tmp_path / "p.txt").write_bytes(b"a\x0cb\r\n\r\nc\n")
    for name, expected in [("p.jsonl", [odd]), ("p.txt", ["a\x0cb", "", "c"])]:
        flags = ["--input", str(tmp_path / name), "--max-new-tokens", "3"]
        assert main(["--load", str(folder), *flags]) == 0
        texts = [
            prompt + text_of(model, prompt, 3, seed=seed) + "\n"
            for seed, prompt in enumerate(expected)
        ]
        assert capsys.readouterr().out == "".join(texts)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_interrupted_all_ranks_end_at_once(
    num_ranks: int, saved: tuple[Path, GPT], tmp_path: Path
) -> None:
    """The launcher need not wait for ranks that wait for each other: it gives them five minutes."""
    flags = f"--load {saved[0]} --prompt ab --stop never --max-new-tokens 1000000"
    alone = [sys.executable, str(ROOT / "tools/generate.py"), *flags.split()]
    command = alone if num_ranks == 1 else zeropp(2, "tools/generate.py", flags)
    log = tmp_path / "log"
    process = start(command, log, tmp_path)
    wait_for("ab", log, process)
    time.sleep(0.5)
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert time.monotonic() - begun < 4
    assert " tokens/s]" in log.read_text() and "Traceback" not in log.read_text()


def test_control_characters_are_not_sent_to_a_terminal() -> None:
    text = "a\x1b[2Jb\tc\nd\x9b\x07\re\x7f世"
    assert text.translate(UNPRINTABLE) == "a�[2Jb\tc\nd���e�世"
