"""Chat templates: messages become the tokens that the model was trained on, or an error."""

import json
from pathlib import Path

import pytest

pytest.importorskip("jinja2")

from tokenizers import Tokenizer  # noqa: E402

from megatron_zpp.text.chat_template import ChatTemplate  # noqa: E402
from tests.megatron_zpp.text.chat_files import TEMPLATE, write_chat_files  # noqa: E402
from zeropp.errors import InputError  # noqa: E402

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé?"}]


@pytest.mark.parametrize("in_own_file", [False, True])
def test_messages_become_tokens(in_own_file: bool, tmp_path: Path) -> None:
    """In a file of its own, or in tokenizer_config.json; names of special tokens are one id."""
    vocabulary = write_chat_files(tmp_path, in_own_file=in_own_file)
    for folder in (tmp_path, tmp_path / "tokenizer.json"):
        template = ChatTemplate.find(folder)
        text = template.render(HELLO)
        opening = "<|begin|>system\nBe brief.<|end|>\n<|begin|>user\nHé?<|end|>\n"
        assert text == opening + "<|begin|>assistant\n"
        tokens = template.encode(text)
        assert tokens.count(vocabulary["<|begin|>"]) == 3
        assert tokens.count(vocabulary["<|end|>"]) == 2
        assert len(tokens) == 5 + len(text.encode()) - 3 * len("<|begin|>") - 2 * len("<|end|>")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}"
        "{% endfor %}",
        "{% for m in messages %}a {%- generation -%} {{ m.content }} {% endgeneration %} b"
        "{% endfor %}",
        "{{ messages | tojson(indent=2) }}{{ messages[1] | tojson }}",
        "{{ strftime_now('%Y') }}",
    ],
)
def test_templates_render_as_in_transformers(template: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_chat_files(tmp_path, template=template)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=template
    )
    expected = theirs.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate.find(tmp_path).render(HELLO) == expected


def test_the_default_of_several_templates(tmp_path: Path) -> None:
    both = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    write_chat_files(tmp_path, template=both)
    assert ChatTemplate.find(tmp_path).render(HELLO) == "d"
    write_chat_files(tmp_path, template=both[:1])
    assert ChatTemplate.find(tmp_path) is None


def test_prompts_are_neither_truncated_nor_padded(tmp_path: Path) -> None:
    """A tokenizer.json may say so for training."""
    write_chat_files(tmp_path)
    template = ChatTemplate.find(tmp_path)
    text = template.render(HELLO)
    tokens = template.encode(text)
    file = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(10)
    tokenizer.enable_padding(length=500)
    tokenizer.save(str(file))
    assert ChatTemplate.find(tmp_path).encode(text) == tokens


def test_a_config_that_is_not_an_object(tmp_path: Path) -> None:
    write_chat_files(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InputError, match="tokenizer_config.json: expected an object"):
        ChatTemplate.find(tmp_path)


def test_without_a_template(tmp_path: Path) -> None:
    assert ChatTemplate.find(None) is None
    assert ChatTemplate.find(tmp_path) is None
    write_chat_files(tmp_path)
    assert ChatTemplate.find(tmp_path / "gone") is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    assert ChatTemplate.find(tmp_path) is None


def test_the_last_message_is_continued(tmp_path: Path) -> None:
    """Without a generation prompt nothing follows the text of the last message."""
    write_chat_files(tmp_path)
    template = ChatTemplate.find(tmp_path)
    messages = [*HELLO, {"role": "assistant", "content": "Yes, "}]
    text = template.render(messages, add_generation_prompt=False)
    assert text == template.render(HELLO) + "Yes,"
    write_chat_files(tmp_path, template="{{ messages[0].content }}")
    with pytest.raises(InputError, match="leaves out the message 'Yes,'"):
        ChatTemplate.find(tmp_path).render(messages, add_generation_prompt=False)


def test_a_template_that_refuses(tmp_path: Path) -> None:
    write_chat_files(tmp_path, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match="refuses these messages: roles must alternate"):
        ChatTemplate.find(tmp_path).render(HELLO)


def test_a_template_that_is_broken(tmp_path: Path) -> None:
    write_chat_files(tmp_path, template=TEMPLATE.replace("endfor", "endfour"))
    with pytest.raises(InputError, match="chat template is not valid"):
        ChatTemplate.find(tmp_path)


def test_a_template_may_not_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    write_chat_files(tmp_path, template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(InputError, match="refuses"):
        ChatTemplate.find(tmp_path).render(HELLO)
