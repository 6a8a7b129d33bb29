"""Messages to a prompt, by the chat template that comes with a model's tokenizer.

The template is Jinja, in chat_template.jinja or in tokenizer_config.json, as Hugging Face stores
it. It comes with a model, so it runs in Jinja's sandbox. The names of special tokens become their
ids, also where the text of a message spells them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_zpp.tokenizer.base import load_package, read_json, read_text
from zeropp.errors import InputError

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """A template (`source`) and the tokenizer.json that encodes its text."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tokenizer_file: Path
    ) -> None:
        jinja = load_package("jinja2", "a chat template")
        sandbox = load_package("jinja2.sandbox", "a chat template")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.source = source
        self._errors = (jinja.TemplateError, TypeError)
        try:
            self._template = environment.from_string(_without_generation_tags(source))
        except jinja.TemplateError as error:
            raise InputError(f"the chat template is not valid: {error}") from error
        self._special_tokens = dict(special_tokens)
        library = load_package("tokenizers", "a chat template")
        self._tokenizer = library.Tokenizer.from_file(str(tokenizer_file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @classmethod
    def find(cls, path: Path | None) -> "ChatTemplate | None":
        """The template of the tokenizer in a folder, or beside a file; None if there is none."""
        if path is None:
            return None
        folder = path.parent if path.is_file() else path
        config_file = folder / "tokenizer_config.json"
        template_file = folder / "chat_template.jinja"
        config = read_json(config_file, "the tokenizer's") if config_file.is_file() else {}
        source = _default_template(config.get("chat_template"))
        if template_file.is_file():
            source = read_text(template_file, "the tokenizer's")
        if not isinstance(source, str) or not (folder / "tokenizer.json").is_file():
            return None
        special_tokens = {name: _token_text(config.get(name)) for name in SPECIAL_TOKENS}
        return cls(source, special_tokens, folder / "tokenizer.json")

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt as text, up to where the answer begins.

        Without `add_generation_prompt` the prompt ends with the text of the last message, which
        the model continues. Raises InputError for messages that the template refuses.
        """
        try:
            text = self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except self._errors as error:
            raise InputError(f"the chat template refuses these messages: {error}") from error
        if add_generation_prompt:
            return text
        last = messages[-1]["content"].strip()
        if last not in text:
            raise InputError(f"the chat template leaves out the message {last[:60]!r}")
        return text[: text.rindex(last) + len(last)]

    def encode(self, text: str) -> list[int]:
        """The token ids of a rendered text, in which special tokens are one id each."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _token_text(token: Any) -> str:
    """A special token's text, which may be in an object."""
    return (token.get("content") if isinstance(token, dict) else token) or ""


def _default_template(source: Any) -> Any:
    """Of a list of objects with name and template, the template named "default"."""
    if not isinstance(source, list):
        return source
    by_name = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
    return by_name.get("default")


def _without_generation_tags(source: str) -> str:
    """The template without `{% generation %}`, which marks what is trained on; Jinja lacks it."""
    tag = r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})"

    def replacement(match: re.Match) -> str:
        return match[1] + ("endif" if match[2] else "if true") + match[3]

    return re.sub(tag, replacement, source)


def _to_json(value: Any, **settings: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **settings)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise_exception(message: str) -> None:
    raise InputError(f"the chat template refuses these messages: {message}")
