"""A small model behind a real server on a free port, and a client that reads what it says."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.serve.worker import Worker
from megatron_zpp.text.chat import ChatTemplate
from megatron_zpp.text.text_model import TextModel
from megatron_zpp.tokenizer.byte_level import ByteLevelTokenizer
from tests.megatron_zpp.model.small import GPT2

POSITIONS = 256
SHAPE = replace(GPT2, seq_length=POSITIONS, num_layers=2, init_method_std=0.2)
SOON = 20  # seconds


def text_model() -> TextModel:
    """A model of bytes that writes at random; the end of a document it never draws."""
    tokenizer = ByteLevelTokenizer()
    with torch.device("meta"):
        model = GPT(SHAPE, tokenizer.vocab_size)
    model.to_empty(device="cpu")
    initialize(model, 1, SHAPE)
    # The last channel is 1 at the end, and only the end's embedding looks at it.
    with torch.no_grad():
        model.tokens.weight[:, -1] = 0
        model.tokens.weight[tokenizer.eod, -1] = -1000
        model.norm.weight[-1], model.norm.bias[-1] = 0, 1
    return TextModel(name="tiny", model=model.eval(), tokenizer=tokenizer)


@dataclass
class Server:
    """Where it listens, and what stands behind it; `pause` slows down each token (seconds)."""

    port: int
    model: TextModel
    worker: Worker
    pause: float = 0.0
    steps: int = 0

    def ask(
        self, method: str, path: str, content: Any = None, raw: bytes | None = None
    ) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SOON)
        body = raw if raw is not None else None if content is None else json.dumps(content)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, json.loads(text)

    def events(self, content: dict, path: str = "/v1/completions") -> list[Any]:
        """The events of a stream, the last one as it is."""
        connection = self.begin(content, path)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        parts = response.read().decode().split("\n\n")
        connection.close()
        assert parts.pop() == ""
        words = [part.removeprefix("data: ") for part in parts]
        return [*map(json.loads, words[:-1]), words[-1]]

    def begin(self, content: dict, path: str = "/v1/completions") -> http.client.HTTPConnection:
        """A connection on which a streaming request was sent."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SOON)
        connection.request("POST", path, json.dumps({"stream": True, **content}))
        return connection

    def wait_until_idle(self) -> None:
        """Wait for the end of all requests; fails if there is none soon."""
        deadline = time.monotonic() + SOON
        while self.worker.is_running:
            assert time.monotonic() < deadline, "the request goes on"
            time.sleep(0.01)


@contextlib.contextmanager
def serving(
    model: TextModel, *, template: ChatTemplate | None = None, most_waiting: int = 4
) -> Iterator[Server]:
    """A server with `model` behind it, in threads of this process."""
    import uvicorn

    from megatron_zpp.serve.app import make_app

    listener = socket.create_server(("127.0.0.1", 0))
    worker = Worker(model, most_waiting)
    found = Server(listener.getsockname()[1], model, worker)

    def step(*_: object) -> None:
        found.steps += 1
        time.sleep(found.pause)

    hook = model.model.register_forward_pre_hook(step)
    application = make_app(model, worker, template, 4)
    server = uvicorn.Server(uvicorn.Config(application, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield found
    finally:
        hook.remove()
        found.pause = 0
        worker.close()
        server.should_exit = True
        thread.join()
        listener.close()
