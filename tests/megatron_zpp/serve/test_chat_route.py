"""/v1/chat/completions: there where the tokenizer has a chat template, and only there."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason='pip install "megatron-zpp[serve]"')
pytest.importorskip("jinja2")

from megatron_zpp.text.chat import ChatTemplate  # noqa: E402
from megatron_zpp.text.generate import Request, complete  # noqa: E402
from megatron_zpp.text.sampling import Sampling  # noqa: E402
from megatron_zpp.tokenizer.hugging_face import HFTokenizer  # noqa: E402
from tests.megatron_zpp.serve.serving import POSITIONS, Server, serving, text_model  # noqa: E402
from tests.megatron_zpp.text.chat_files import write_chat_files  # noqa: E402

MESSAGES = [{"role": "user", "content": "Hi"}]
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("chat")
    write_chat_files(folder)
    model = replace(text_model(), tokenizer=HFTokenizer(str(folder)))
    with serving(model, template=ChatTemplate.find(folder)) as found:
        yield found


def expected(server: Server, template: ChatTemplate, count: int) -> str:
    prompt = template.prompt(MESSAGES)
    request = Request(prompt=prompt, max_new_tokens=count, sampling=Sampling(seed=3))
    return complete(server.model.model, server.model.tokenizer, [request])[0]


def test_an_answer_whole_and_streaming(server: Server, tmp_path: Path) -> None:
    write_chat_files(tmp_path)
    text = expected(server, ChatTemplate.find(tmp_path), 9)
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    for messages in (MESSAGES, [{"role": "user", "content": parts}]):
        asked = {"messages": messages, "max_completion_tokens": 9, "seed": 3}
        status, answer = server.ask("POST", PATH, asked)
        assert status == 200 and answer["object"] == "chat.completion", answer
        choice = answer["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": text}
        assert choice["finish_reason"] == "length"
    *chunks, done = server.events(asked, PATH)
    assert done == "[DONE]" and {one["object"] for one in chunks} == {"chat.completion.chunk"}
    deltas = [one["choices"][0]["delta"] for one in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == text


def test_without_a_number_an_answer_may_take_what_is_left(server: Server) -> None:
    _, answer = server.ask("POST", PATH, {"messages": MESSAGES, "temperature": 0})
    usage = answer["usage"]
    is_full = usage["total_tokens"] == POSITIONS
    assert is_full or answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (None, "must be a list"),
        ([], "must be a list"),
        ([{"content": "a"}], "messages[0] needs a role"),
        ([{"role": "queen", "content": "a"}], "messages[0] needs a role"),
        ([*MESSAGES, {"role": "user"}], "messages[1] needs a content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0] needs a content"),
        ([{"role": "user", "content": "\ud800"}], "not Unicode"),
        ([{"role": "user", "content": "a" * 300}], "positions"),
    ],
)
def test_malformed_messages(messages: object, said: str, server: Server) -> None:
    status, answer = server.ask("POST", PATH, {"messages": messages})
    assert status == 400 and said in answer["error"]["message"]


def test_a_model_without_a_template_says_where_to_ask() -> None:
    with serving(text_model()) as plain:
        status, answer = plain.ask("POST", PATH, {"messages": MESSAGES})
        assert status == 404 and "/v1/completions" in answer["error"]["message"]
