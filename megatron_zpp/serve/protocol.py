"""OpenAI's completion API as data: what a client may ask, what it is told, and errors in its form.

What is asked is checked whole before anything runs. A field that is unknown, or known and not
available here, is an error that names it, unless its value asks for nothing.
Source: the reference of the OpenAI API, completions and chat completions.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron_zpp.text.chat import ChatTemplate
from megatron_zpp.text.generate import LENGTH, Piece, Request
from megatron_zpp.text.sampling import Sampling
from megatron_zpp.text.text_model import TextModel
from zeropp.errors import InputError

DEFAULT_TOKENS = 16  # of a completion; a chat's answer may take all that is left
MOST_STOPS = 4
# Fields that are accepted as long as they ask for nothing, with the values that do.
IDLE: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "best_of": (None, 1), "frequency_penalty": (None, 0), "logit_bias": (None, {}),
        "logprobs": (None, False), "presence_penalty": (None, 0), "suffix": (None, ""),
        "top_logprobs": (None,), "response_format": (None, {"type": "text"}), "tools": (None, []),
    }
)  # fmt: skip
COMMON = {"model", "n", "stream", "stream_options", "stop", "seed", "temperature", "top_p",
          "top_k", "max_tokens", "user"}  # fmt: skip
COMPLETION_FIELDS = frozenset(COMMON | {"prompt", "echo", *IDLE})
CHAT_FIELDS = frozenset(COMMON | {"messages", "max_completion_tokens", *IDLE})
ROLES = ("system", "developer", "user", "assistant", "tool")


class ApiError(Exception):
    """A refusal with its HTTP status, in the form that OpenAI's clients read."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }


@dataclass(frozen=True, kw_only=True)
class Query:
    """What a client asked for: a request for each choice, and the form of the answer."""

    requests: tuple[Request, ...]
    echoes: tuple[str, ...]  # what each choice's text begins with
    is_chat: bool
    streams: bool
    wants_usage: bool
    num_prompt_tokens: int


def read_completion(body: bytes, model: TextModel, most: int) -> Query:
    """The query of a body for /v1/completions, of `most` choices; raises ApiError."""
    fields = _fields(body, COMPLETION_FIELDS, model)
    texts, prompts = _prompts(fields, model)
    echoes = texts if _flag(fields, "echo") else ("",) * len(prompts)
    return _query(fields, model, most, prompts, echoes, DEFAULT_TOKENS)


def read_chat(body: bytes, model: TextModel, most: int, template: ChatTemplate | None) -> Query:
    """The query of a body for /v1/chat/completions; raises ApiError."""
    if template is None:
        raise ApiError(
            "this model has no chat template: use /v1/completions", status=404, code="no_chat"
        )
    fields = _fields(body, CHAT_FIELDS, model)
    try:
        prompt = template.prompt(_messages(fields))
    except InputError as error:
        raise ApiError(str(error), "messages") from None
    if fields.get("max_completion_tokens") is not None:
        fields["max_tokens"] = fields["max_completion_tokens"]
    left = max(model.model.config.num_positions - len(prompt), 1)
    return _query(fields, model, most, (prompt,), ("",), left, is_chat=True)


class Answer:
    """Turns the pieces of a query's texts into the objects that the client gets."""

    def __init__(self, query: Query, model_name: str) -> None:
        self._query = query
        name = "chatcmpl" if query.is_chat else "cmpl"
        self._head = {
            "id": f"{name}-{secrets.token_hex(12)}", "created": int(time.time()),
            "model": model_name,
        }  # fmt: skip
        self._texts = list(query.echoes)
        self._counts = [0] * len(query.requests)
        self._finishes: list[str | None] = [None] * len(query.requests)

    def add(self, piece: Piece) -> None:
        """Note a piece."""
        self._texts[piece.row] += piece.text
        self._counts[piece.row] = piece.num_tokens
        self._finishes[piece.row] = piece.finish

    def openings(self) -> list[dict]:
        """The chunks that come before the first piece: roles, or prompts that are echoed."""
        rows = range(len(self._query.requests))
        if self._query.is_chat:
            return [self._chunk(row, delta={"role": "assistant", "content": ""}) for row in rows]
        return [self._chunk(row, text=self._texts[row]) for row in rows if self._texts[row]]

    def chunk(self, piece: Piece) -> dict | None:
        """What a stream says of a piece, if anything."""
        if not piece.text and piece.finish is None:
            return None
        if self._query.is_chat:
            delta = {"content": piece.text} if piece.text else {}
            return self._chunk(piece.row, piece.finish, delta=delta)
        return self._chunk(piece.row, piece.finish, text=piece.text)

    def closing(self) -> dict | None:
        """The last chunk, with how many tokens there were, where it was asked for."""
        if not self._query.wants_usage:
            return None
        kind = "chat.completion.chunk" if self._query.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": [], "usage": self._usage()}

    def whole(self) -> dict:
        """The answer of a query that does not stream."""
        kind = "chat.completion" if self._query.is_chat else "text_completion"
        choices = []
        for row, (text, finish) in enumerate(zip(self._texts, self._finishes, strict=True)):
            message = {"message": {"role": "assistant", "content": text}}
            content = message if self._query.is_chat else {"text": text}
            choices.append(
                {"index": row, **content, "logprobs": None, "finish_reason": finish or LENGTH}
            )
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage()}

    def _chunk(self, row: int, finish: str | None = None, **content: object) -> dict:
        kind = "chat.completion.chunk" if self._query.is_chat else "text_completion"
        choice = {"index": row, **content, "logprobs": None, "finish_reason": finish}
        return {**self._head, "object": kind, "choices": [choice]}

    def _usage(self) -> dict[str, int]:
        drawn, given = sum(self._counts), self._query.num_prompt_tokens
        return {
            "prompt_tokens": given, "completion_tokens": drawn, "total_tokens": given + drawn,
        }  # fmt: skip


def _fields(body: bytes, known: frozenset[str], model: TextModel) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError("the body is not a JSON object")
    for name in fields:
        if name not in known:
            shown = name.encode(errors="replace").decode()  # JSON can spell half of a pair
            raise ApiError(f"unknown field {name!r}", shown, code="unknown_parameter")
    for name, values in IDLE.items():
        if not any(_is_same(fields.get(name), value) for value in values):
            raise ApiError(f"{name!r} is not available here: leave it out", name)
    asked = fields.get("model")
    if asked is not None and asked != model.name:
        raise ApiError(
            f"there is no model {asked!r} here, only {model.name!r}", "model", status=404,
            code="model_not_found",
        )  # fmt: skip
    return fields


def _query(
    fields: Mapping[str, Any],
    model: TextModel,
    most: int,
    prompts: Sequence[tuple[int, ...]],
    echoes: Sequence[str],
    default_tokens: int,
    is_chat: bool = False,
) -> Query:
    copies = _number(fields, "n", 1, int, 1, most)
    if len(prompts) * copies > most:
        raise ApiError(
            f"{len(prompts)} prompts x {copies} choices are more than {most} texts at once", "n"
        )
    seed = _number(fields, "seed", secrets.randbits(48), int, 0, 2**62)
    tokens = _number(fields, "max_tokens", default_tokens, int, 0, 2**31)
    settings = {
        "temperature": _number(fields, "temperature", 1.0, float, 0, 100),
        "top_p": _number(fields, "top_p", 1.0, float, 1e-6, 1),
        "top_k": _number(fields, "top_k", 0, int, 0, 2**31),
    }
    requests = tuple(
        Request(
            prompt=prompt,
            max_new_tokens=tokens,
            sampling=Sampling(**settings, seed=seed + index * copies + copy),
            stop_texts=_stops(fields),
        )
        for index, prompt in enumerate(prompts)
        for copy in range(copies)
    )
    for request in requests:
        _check_length(request, model)
    return Query(
        requests=requests,
        echoes=tuple(echo for echo in echoes for _ in range(copies)),
        is_chat=is_chat,
        streams=_flag(fields, "stream"),
        wants_usage=_wants_usage(fields),
        num_prompt_tokens=sum(len(prompt) for prompt in prompts),
    )


def _check_length(request: Request, model: TextModel) -> None:
    positions, given = model.model.config.num_positions, len(request.prompt)
    if given + request.max_new_tokens > positions:
        raise ApiError(
            f"the model has {positions:,} positions, but the prompt has {given:,} tokens and "
            f"{request.max_new_tokens:,} more are asked for: shorten one of them",
            "prompt" if given > positions else "max_tokens",
            code="context_length_exceeded",
        )
    try:
        model.check(request)
    except InputError as error:
        raise ApiError(str(error), "prompt") from None


def _prompts(
    fields: Mapping[str, Any], model: TextModel
) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    """The prompts as texts and as tokens; a prompt may be given as either."""
    given = fields.get("prompt")
    several = isinstance(given, list) and given and not _is_tokens(given)
    texts, prompts = [], []
    for prompt in given if several else [given]:
        if isinstance(prompt, str):
            _require_unicode(prompt, "prompt")
            texts.append(prompt)
            prompts.append(tuple(model.tokenizer.prompt(prompt)))
        elif _is_tokens(prompt):
            outside = [one for one in prompt if not 0 <= one < model.tokenizer.vocab_size]
            if outside:
                raise ApiError(f"there is no token {outside[0]} in this model", "prompt")
            texts.append(model.tokenizer.decode(prompt))
            prompts.append(tuple(prompt))
        else:
            raise ApiError("'prompt' must be text, a list of tokens, or a list of these", "prompt")
    return tuple(texts), prompts


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _messages(fields: Mapping[str, Any]) -> list[dict[str, str]]:
    given = fields.get("messages")
    if not isinstance(given, list) or not given:
        raise ApiError("'messages' must be a list of messages", "messages")
    messages = []
    for number, message in enumerate(given):
        place = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ApiError(f"{place} needs a role: one of {', '.join(ROLES)}", "messages")
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
        if not isinstance(content, str):
            raise ApiError(f"{place} needs a content that is text", "messages")
        _require_unicode(content, "messages")
        messages.append({"role": message["role"], "content": content})
    return messages


def _require_unicode(text: str, param: str) -> None:
    """JSON can spell half of a surrogate pair, which no text holds."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(f"{param!r} is not Unicode text: {error.reason}", param) from None


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    given = fields.get("stop")
    stops = [] if given is None else [given] if isinstance(given, str) else given
    is_texts = isinstance(stops, list) and all(isinstance(one, str) and one for one in stops)
    if not is_texts or len(stops) > MOST_STOPS:
        raise ApiError(f"'stop' must be a text or up to {MOST_STOPS} of them, none empty", "stop")
    return tuple(stops)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"{name!r} must be true or false", name)
    return bool(value)


def _wants_usage(fields: Mapping[str, Any]) -> bool:
    name = "stream_options"
    options = fields.get(name)
    if options is None:
        return False
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise ApiError(f'{name!r} must be an object; known in it is "include_usage"', name)
    if not _flag(fields, "stream"):
        raise ApiError(f'{name!r} is for answers with "stream": true', name)
    return _flag(options, "include_usage")


def _is_same(given: Any, value: Any) -> bool:
    """Whether they are equal in JSON, where 0 is not false."""
    return given == value and isinstance(given, bool) == isinstance(value, bool)


def _number(
    fields: Mapping[str, Any],
    name: str,
    default: float,
    kind: Callable[[Any], Any],
    least: float,
    most: float,
) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    kinds = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        what = "a whole number" if kind is int else "a number"
        raise ApiError(f"{name!r} must be {what} from {least:g} to {most:g}", name)
    return kind(value)
