"""A completion endpoint as OpenAI's, and a page to try it.

    python tools/serve.py --load checkpoints --port 8000

It answers at /v1/completions, streaming too, at /v1/models and /health, at /v1/chat/completions
where the model's tokenizer has a chat template, and shows a page at /. One request runs at a time,
others wait; a client that leaves ends its request. Started by torchrun or zeropp the ranks share
the weights. Needs the packages of `pip install "megatron-zpp[serve]"`.
"""

import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]  # also where nothing is installed

from megatron_zpp.serve.config import ServeConfig  # noqa: E402
from megatron_zpp.serve.worker import Worker  # noqa: E402
from megatron_zpp.settings.config import TokenizerConfig  # noqa: E402
from megatron_zpp.text.chat import ChatTemplate  # noqa: E402
from megatron_zpp.text.text_model import TextModel, TextModelConfig, open_text_model  # noqa: E402
from megatron_zpp.text.text_tool import run_tool  # noqa: E402
from zeropp.errors import InputError  # noqa: E402
from zeropp.ranks.process_group import leave  # noqa: E402
from zeropp.ranks.topology import Environment  # noqa: E402

USAGE = "usage: python tools/serve.py --load FOLDER [--port N] [flags]"
SECTIONS = (TextModelConfig, ServeConfig, TokenizerConfig)


def main(argv: Sequence[str]) -> int:
    """Run the server until it is told to end; returns the exit status."""
    return run_tool(argv, USAGE, SECTIONS, run)


def run(
    environment: Environment,
    model_config: TextModelConfig,
    config: ServeConfig,
    tokenizer: TokenizerConfig,
) -> None:
    """Open the model on all ranks; the first one listens."""
    app = _app()
    model = open_text_model(model_config, tokenizer, environment)
    if environment.rank:
        model.follow()
        return
    try:
        listen(model, config, app)
    finally:
        model.close()


def listen(model: TextModel, config: ServeConfig, app: ModuleType) -> None:
    """Serve on the first rank; says where once clients can connect."""
    template = ChatTemplate.find(model.chat_folder)
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listener = socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        raise InputError(
            f"cannot listen at --host {config.host} --port {config.port}: {error.strerror}"
        ) from None
    worker = Worker(model, config.max_waiting)
    try:
        application = app.make_app(model, worker, template, config.max_texts)
        server = app.Server(application, worker)
        host = f"[{config.host}]" if ":" in config.host else config.host
        print(f"serving {model.name} at http://{host}:{listener.getsockname()[1]}", flush=True)
        server.run(sockets=[listener])
    finally:
        worker.close()
        listener.close()


def _app() -> ModuleType:
    """`megatron_zpp.serve.app`; the packages that it needs are an extra."""
    try:
        return import_module("megatron_zpp.serve.app")
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        raise InputError(
            f'the server needs the package {package}: pip install "megatron-zpp[serve]"'
        ) from None


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
