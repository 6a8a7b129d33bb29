"""The server as clients see it: real requests to a real port, good, bad, and given up."""

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("starlette", reason='pip install "megatron-zpp[serve]"')
pytest.importorskip("uvicorn", reason='pip install "megatron-zpp[serve]"')

from megatron_zpp.serve.app import MAX_BODY  # noqa: E402
from megatron_zpp.text.generate import Request, complete  # noqa: E402
from megatron_zpp.text.sampling import Sampling  # noqa: E402
from tests.megatron_zpp.serve.serving import POSITIONS, Server, serving, text_model  # noqa: E402

LONG = {"prompt": "a", "max_tokens": POSITIONS - 1}


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with serving(text_model()) as found:
        yield found


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    running.wait_until_idle()
    running.steps = 0
    yield running
    running.pause = 0


def expected(server: Server, prompt: str, count: int, seed: int, **settings: object) -> str:
    request = Request(
        prompt=tuple(prompt.encode()), max_new_tokens=count,
        sampling=Sampling(seed=seed, **settings),
    )  # fmt: skip
    return complete(server.model.model, server.model.tokenizer, [request])[0]


def test_a_completion(server: Server) -> None:
    asked = {"model": "tiny", "prompt": "ab", "max_tokens": 12, "seed": 5, "user": "me"}
    status, answer = server.ask("POST", "/v1/completions", asked)
    assert status == 200 and answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert answer["id"].startswith("cmpl-") and abs(answer["created"] - time.time()) < 60
    text = expected(server, "ab", 12, 5)
    assert answer["choices"] == [
        {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14}


def test_a_stream_brings_the_same(server: Server) -> None:
    asked = {"prompt": "ab", "max_tokens": 12, "seed": 5, "stream_options": {"include_usage": True}}
    *chunks, usage, done = server.events(asked)
    assert done == "[DONE]" and usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == expected(server, "ab", 12, 5)
    assert [choice["finish_reason"] for choice in choices[-2:]] == [None, "length"]
    assert len(choices) > 3  # it did not come at once


def test_several_prompts_choices_and_settings(server: Server) -> None:
    asked = {"prompt": ["a", [98, 99]], "n": 2, "max_tokens": 6, "seed": 1, "echo": True,
             "temperature": 0.5, "top_p": 0.9, "top_k": 20}  # fmt: skip
    _, answer = server.ask("POST", "/v1/completions", asked)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 20}
    assert [choice["text"] for choice in answer["choices"]] == [
        prompt + expected(server, prompt, 6, 1 + seed, **settings)
        for seed, prompt in enumerate(["a", "a", "bc", "bc"])
    ]
    *chunks, _ = server.events(asked)
    for row in range(4):
        texts = [one["choices"][0]["text"] for one in chunks if one["choices"][0]["index"] == row]
        assert "".join(texts) == answer["choices"][row]["text"]


def test_a_stop_text_ends_it_and_is_left_out(server: Server) -> None:
    whole = expected(server, "ab", 40, 5)
    stop = next(part for part in (whole[i : i + 2] for i in range(5, 40)) if "\ufffd" not in part)
    for stops in (stop, [stop, "something else"]):
        asked = {"prompt": "ab", "max_tokens": 40, "seed": 5, "stop": stops}
        _, answer = server.ask("POST", "/v1/completions", asked)
        assert answer["choices"][0]["text"] == whole[: whole.index(stop)]
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_nothing_asked_for(server: Server) -> None:
    asked = {"prompt": "ab", "max_tokens": 0, "echo": True}
    _, answer = server.ask("POST", "/v1/completions", asked)
    assert answer["choices"][0]["text"] == "ab" and answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("change", "status", "param", "said"),
    [
        ({"prompt": None}, 400, "prompt", "must be text, a list of tokens, or a list of these"),
        ({"prompt": []}, 400, "prompt", "must be text"),
        ({"prompt": [1, "a"]}, 400, "prompt", "must be text"),
        ({"prompt": {"a": 1}}, 400, "prompt", "must be text"),
        ({"prompt": [1, 257]}, 400, "prompt", "there is no token 257"),
        ({"prompt": "\ud800"}, 400, "prompt", "not Unicode"),
        ({"prompt": "a" * 257}, 400, "prompt", "256 positions, but the prompt has 257 tokens"),
        ({"prompt": "a" * 241}, 400, "max_tokens", "241 tokens and 16 more"),
        ({"max_tokens": 256}, 400, "max_tokens", "shorten one of them"),
        ({"max_tokens": -1}, 400, "max_tokens", "whole number from 0"),
        ({"max_tokens": 1.5}, 400, "max_tokens", "whole number"),
        ({"max_tokens": True}, 400, "max_tokens", "whole number"),
        ({"temperature": "hot"}, 400, "temperature", "a number from 0 to 100"),
        ({"temperature": -0.1}, 400, "temperature", "a number from 0"),
        ({"temperature": float("nan")}, 400, "temperature", "a number from 0"),
        ({"top_p": 0}, 400, "top_p", "a number from"),
        ({"top_k": -1}, 400, "top_k", "whole number"),
        ({"seed": -1}, 400, "seed", "whole number"),
        ({"n": 5}, 400, "n", "from 1 to 4"),
        ({"n": 3, "prompt": ["a", "b"]}, 400, "n", "2 prompts x 3 choices are more than 4"),
        ({"stop": 3}, 400, "stop", "a text or up to 4"),
        ({"stop": ["a", ""]}, 400, "stop", "none empty"),
        ({"stop": list("abcde")}, 400, "stop", "up to 4"),
        ({"stream": "yes"}, 400, "stream", "true or false"),
        ({"echo": 1}, 400, "echo", "true or false"),
        ({"logprobs": 3}, 400, "logprobs", "not available here"),
        ({"logprobs": 0}, 400, "logprobs", "not available here"),
        ({"best_of": True}, 400, "best_of", "not available here"),
        ({"stream_options": "usage"}, 400, "stream_options", "must be an object"),
        ({"stream_options": {"usage": True}}, 400, "stream_options", 'known in it is "include_usa'),
        ({"\ud800": 1}, 400, "?", "unknown field '\\ud800'"),
        ({"best_of": 2}, 400, "best_of", "not available here"),
        ({"tempreature": 1}, 400, "tempreature", "unknown field"),
        ({"model": "gpt-9"}, 404, "model", "there is no model 'gpt-9' here, only 'tiny'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_malformed_requests(
    change: dict, status: int, param: str, said: str, stream: bool, server: Server
) -> None:
    """Each is refused before the model runs, whole or streaming, and the server goes on."""
    asked = {"prompt": "a", "stream": stream, **change}
    found, answer = server.ask("POST", "/v1/completions", asked)
    assert found == status
    error = answer["error"]
    assert said in error["message"] and error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert server.steps == 0


def test_usage_is_asked_for_in_streams_only(server: Server) -> None:
    asked = {"prompt": "a", "stream_options": {"include_usage": True}}
    status, answer = server.ask("POST", "/v1/completions", asked)
    assert status == 400 and answer["error"]["param"] == "stream_options"
    asked = {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}}
    status, answer = server.ask("POST", "/v1/completions", asked)
    assert status == 400 and "true or false" in answer["error"]["message"]


def test_a_client_that_leaves_before_it_has_asked(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """That is not the server's failure, and leaves no traceback in its log."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n"
        connection.sendall(head + b"{")
        time.sleep(0.2)
    assert server.ask("POST", "/v1/completions", {"prompt": "a"})[0] == 200
    assert not caplog.records


def test_too_long_has_the_code_that_clients_know(server: Server) -> None:
    _, answer = server.ask("POST", "/v1/completions", {"prompt": "a" * 300})
    assert answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not JSON"), (b"{", "not JSON"), (b"\xff\xfe", "not JSON"),
        (b"[1]", "not a JSON object"), (b'"a"', "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
    ],
)  # fmt: skip
def test_bodies_that_are_not_json(raw: bytes, said: str, server: Server) -> None:
    status, answer = server.ask("POST", "/v1/completions", raw=raw)
    assert status == 400 and said in answer["error"]["message"]


def test_a_body_without_end(server: Server) -> None:
    """It is refused as soon as it is too long, without its end."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999999\r\n\r\n"
        client.sendall(head.encode())
        client.sendall(b" " * (MAX_BODY + 1))
        assert client.recv(1000).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v2", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405),
     ("GET", "/v1/models/other", 404)],
)  # fmt: skip
def test_addresses_that_are_not_there(method: str, path: str, status: int, server: Server) -> None:
    found, answer = server.ask(method, path)
    assert found == status and answer["error"]["type"] == "invalid_request_error"


def test_models_and_health(server: Server) -> None:
    status, answer = server.ask("GET", "/v1/models")
    assert status == 200 and [model["id"] for model in answer["data"]] == ["tiny"]
    assert server.ask("GET", "/v1/models/tiny") == (200, answer["data"][0])
    assert server.ask("GET", "/health") == (200, {"status": "ok", "running": False, "waiting": 0})


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_its_request(streams: bool, server: Server) -> None:
    """All tokens would take more than 5 s; after the client has left a few more come at most."""
    server.pause = 0.02
    connection = server.begin({**LONG, "stream": streams})
    wait_for_steps(server, 3)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    server.wait_until_idle()
    assert server.steps < POSITIONS / 2
    server.pause = 0
    assert server.ask("POST", "/v1/completions", {"prompt": "a"})[0] == 200


def test_a_client_that_leaves_the_line_is_never_served(server: Server) -> None:
    server.pause = 0.02
    first = server.begin(LONG)
    wait_for_steps(server, 2)
    second = server.begin(LONG)
    while server.ask("GET", "/health")[1]["waiting"] != 1:
        time.sleep(0.01)
    second.close()
    time.sleep(0.2)
    first.close()
    server.wait_until_idle()
    assert server.steps < POSITIONS / 2


def test_requests_wait_for_each_other_and_too_many_are_refused(server: Server) -> None:
    """One runs and four wait; the sixth is told to come back. All five are answered in full."""
    server.pause = 0.005
    answers = []

    def ask() -> None:
        answers.append(server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 100}))

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    while server.worker.num_waiting < 4:
        time.sleep(0.01)
    status, answer = server.ask("POST", "/v1/completions", {"prompt": "a"})
    assert status == 429 and answer["error"]["code"] == "queue_full"
    for thread in threads:
        thread.join()
    assert [status for status, _ in answers] == [200] * 5
    assert {answer["usage"]["completion_tokens"] for _, answer in answers} == {100}


def test_what_fails_inside_is_said_and_the_server_goes_on(server: Server) -> None:
    broken = server.model.model.register_forward_pre_hook(fail)
    try:
        status, answer = server.ask("POST", "/v1/completions", {"prompt": "a"})
        assert status == 500 and answer["error"]["type"] == "server_error"
        assert "out of luck" in answer["error"]["message"]
        connection = server.begin({"prompt": "a"})
        last = connection.getresponse().read().decode().strip().split("\n\n")[-1]
        assert "out of luck" in json.loads(last.removeprefix("data: "))["error"]["message"]
    finally:
        broken.remove()
    assert server.ask("POST", "/v1/completions", {"prompt": "a"})[0] == 200


def fail(*_: object) -> None:
    raise RuntimeError("out of luck")


def wait_for_steps(server: Server, count: int) -> None:
    deadline = time.monotonic() + 20
    while server.steps < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
