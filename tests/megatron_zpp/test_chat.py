"""Chat templates: messages become the tokens that the model was trained on, or an error."""

import json
from pathlib import Path

import pytest

pytest.importorskip("jinja2")

from megatron_zpp.chat import ChatTemplate  # noqa: E402
from tests.megatron_zpp.chat_files import TEMPLATE, write_chat_files  # noqa: E402
from zeropp.errors import InputError  # noqa: E402

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé?"}]


@pytest.mark.parametrize("apart", [False, True])
def test_messages_become_tokens(apart: bool, tmp_path: Path) -> None:
    """In a file of its own, or in tokenizer_config.json; names of special tokens are one id."""
    vocabulary = write_chat_files(tmp_path, apart=apart)
    for folder in (tmp_path, tmp_path / "tokenizer.json"):
        template = ChatTemplate.find(folder)
        text = template.text(HELLO)
        opening = "<|begin|>system\nBe brief.<|end|>\n<|begin|>user\nHé?<|end|>\n"
        assert text == opening + "<|begin|>assistant\n"
        tokens = template.prompt(HELLO)
        assert tokens.count(vocabulary["<|begin|>"]) == 3
        assert tokens.count(vocabulary["<|end|>"]) == 2
        assert len(tokens) == 5 + len(text.encode()) - 3 * len("<|begin|>") - 2 * len("<|end|>")


def test_without_a_template(tmp_path: Path) -> None:
    assert ChatTemplate.find(None) is None
    assert ChatTemplate.find(tmp_path) is None
    write_chat_files(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    assert ChatTemplate.find(tmp_path) is None


def test_a_template_that_refuses(tmp_path: Path) -> None:
    write_chat_files(tmp_path, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match="refuses these messages: roles must alternate"):
        ChatTemplate.find(tmp_path).prompt(HELLO)


def test_a_template_that_is_broken(tmp_path: Path) -> None:
    write_chat_files(tmp_path, template=TEMPLATE.replace("endfor", "endfour"))
    with pytest.raises(InputError, match="chat template is not valid"):
        ChatTemplate.find(tmp_path)


def test_a_template_may_not_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    write_chat_files(tmp_path, template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(InputError, match="refuses"):
        ChatTemplate.find(tmp_path).prompt(HELLO)
