"""Messages to a prompt by the chat template that a model's tokenizer comes with.

The template is Jinja, in chat_template.jinja or in tokenizer_config.json, as Hugging Face lays it
down. It runs in Jinja's sandbox: it came with a model. Its special tokens become the ids they name,
also where a message spells one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_zpp.tokenizer.base import load_package, read_json, read_text
from zeropp.errors import InputError

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """A template and the tokenizer.json that its text is encoded with."""

    def __init__(self, source: str, special: Mapping[str, str], tokenizer_file: Path) -> None:
        jinja = load_package("jinja2", "a chat template")
        sandbox = load_package("jinja2.sandbox", "a chat template")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        self._errors = (jinja.TemplateError, TypeError)
        try:
            self._template = environment.from_string(_plain(source))
        except jinja.TemplateError as error:
            raise InputError(f"the chat template is not valid: {error}") from error
        self._special = dict(special)
        library = load_package("tokenizers", "a chat template")
        self._tokenizer = library.Tokenizer.from_file(str(tokenizer_file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @classmethod
    def find(cls, folder: Path | None) -> "ChatTemplate | None":
        """The template of the tokenizer in `folder`; None if it has none."""
        if folder is None:
            return None
        folder = folder.parent if folder.is_file() else folder
        settings, apart = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config = read_json(settings, "the tokenizer's") if settings.is_file() else {}
        if not isinstance(config, dict):
            raise InputError(f"{settings}: expected an object in braces")
        source = _default(config.get("chat_template"))
        if apart.is_file():
            source = read_text(apart, "the tokenizer's")
        if not isinstance(source, str) or not (folder / "tokenizer.json").is_file():
            return None
        special = {name: _content(config.get(name)) for name in SPECIAL}
        return cls(source, special, folder / "tokenizer.json")

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt as text, up to where the answer begins; raises InputError."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, **self._special
            )
        except self._errors as error:
            raise InputError(f"the chat template refuses these messages: {error}") from error

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The prompt as tokens; raises InputError."""
        return tuple(self._tokenizer.encode(self.text(messages), add_special_tokens=False).ids)


def _content(token: Any) -> str:
    """A special token's text, which may stand in an object."""
    return (token.get("content") if isinstance(token, dict) else token) or ""


def _default(source: Any) -> Any:
    """Of several templates, each an object with its name, the one for talking."""
    if not isinstance(source, list):
        return source
    named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
    return named.get("default")


def _plain(source: str) -> str:
    """The template without marks around what a model learns, which only training looks at."""
    tag = r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})"
    return re.sub(tag, lambda m: m[1] + ("endif" if m[2] else "if true") + m[3], source)


def _json(value: Any, **settings: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **settings)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: str) -> None:
    raise InputError(f"the chat template refuses these messages: {message}")
