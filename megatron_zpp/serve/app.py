"""The HTTP side: OpenAI's routes, a page to try them, and clients that leave."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megatron_zpp.serve.protocol import (
    Answer,
    ApiError,
    Query,
    read_chat,
    read_completion,
)
from megatron_zpp.serve.worker import BusyError, Job, Worker
from megatron_zpp.text.chat import ChatTemplate
from megatron_zpp.text.generate import CANCELLED, Piece
from megatron_zpp.text.text_model import TextModel

PAGE = Path(__file__).with_name("page.html")
MAX_BODY = 8 * 2**20  # bytes
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'",
    "X-Content-Type-Options": "nosniff",
}
DONE = "data: [DONE]\n\n"
GRACE_SECONDS = 3  # for connections that are open when the server is told to end


class Server(uvicorn.Server):
    """Serves `app`; told to end, it gives up what the model is writing, and says so to clients."""

    def __init__(self, app: Starlette, worker: Worker) -> None:
        super().__init__(
            uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS)
        )
        self._worker = worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGINT and SIGTERM."""
        self._worker.give_up()
        super().handle_exit(sig, frame)


def make_app(
    model: TextModel, worker: Worker, template: ChatTemplate | None, most_texts: int
) -> Starlette:
    """The application; a query may ask for `most_texts` texts at once."""
    routes = Routes(model, worker, template, most_texts)
    return Starlette(
        routes=[
            Route("/", routes.page),
            Route("/health", routes.health),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name}", routes.one_model),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
        ],
        exception_handlers={
            ApiError: _refused, HTTPException: _not_found, ClientDisconnect: _left,
            Exception: _failed,
        },
    )  # fmt: skip


class Routes:
    """What each address does."""

    def __init__(
        self, model: TextModel, worker: Worker, template: ChatTemplate | None, most_texts: int
    ) -> None:
        self._model, self._worker = model, worker
        self._template, self._most = template, most_texts

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=PAGE_HEADERS)

    async def health(self, request: Request) -> Response:
        state = {
            "status": "ok" if self._worker.is_alive else "failed",
            "running": self._worker.is_running,
            "waiting": self._worker.num_waiting,
        }
        return JSONResponse(state, status_code=200 if self._worker.is_alive else 503)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._model.name:
            raise ApiError(f"there is no model {name!r} here", "model", status=404,
                           code="model_not_found")  # fmt: skip
        return JSONResponse(self._described())

    async def completions(self, request: Request) -> Response:
        body = await _body(request)
        return await self._answered(request, lambda: read_completion(body, self._model, self._most))

    async def chat(self, request: Request) -> Response:
        body = await _body(request)
        return await self._answered(
            request, lambda: read_chat(body, self._model, self._most, self._template)
        )

    def _described(self) -> dict:
        return {
            "id": self._model.name, "object": "model", "created": 0, "owned_by": "megatron-zpp",
            "max_model_len": self._model.model.config.num_positions,
            "has_chat": self._template is not None,
        }  # fmt: skip

    async def _answered(self, request: Request, read: Callable[[], Query]) -> Response:
        query = await asyncio.to_thread(read)  # encoding a long prompt takes a while
        answer = Answer(query, self._model.name)
        try:
            job = self._worker.submit(query.requests)
        except BusyError:
            raise ApiError(
                "too many requests are waiting: try again later", status=429, code="queue_full"
            ) from None
        if query.streams:
            return StreamingResponse(
                _events(request, job, answer),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
        async with _listening(request, job):
            async for piece in job.pieces():
                answer.add(piece)
        if job.is_cancelled:  # or the client has left, and nobody reads this
            raise _ending()
        return JSONResponse(answer.whole())


@asynccontextmanager
async def _listening(request: Request, job: Job) -> AsyncIterator[None]:
    """Cancel the job when the client leaves, or when its answer ends for any other reason."""
    task = asyncio.create_task(_cancel_when_gone(request, job))
    try:
        yield
    except BaseException:
        job.cancel()
        raise
    finally:
        task.cancel()


async def _cancel_when_gone(request: Request, job: Job) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.cancel()


async def _events(request: Request, job: Job, answer: Answer) -> AsyncIterator[str]:
    """Server-sent events: a chunk for each piece, then [DONE]."""
    async with _listening(request, job):
        for chunk in answer.openings():
            yield _event(chunk)
        try:
            async for piece in job.pieces():
                for event in _piece_events(answer, piece):
                    yield event
            if job.is_cancelled:
                raise _ending()
        except ApiError as error:
            yield _event(error.body)
            return
        except Exception as error:
            yield _event(ApiError(f"the model failed: {error}", status=500).body)
            return
        if (last := answer.closing()) is not None:
            yield _event(last)
        yield DONE


def _piece_events(answer: Answer, piece: Piece) -> list[str]:
    answer.add(piece)
    chunk = None if piece.finish == CANCELLED else answer.chunk(piece)
    return [] if chunk is None else [_event(chunk)]


def _event(content: dict) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise ApiError(f"the body is longer than {MAX_BODY:,} bytes", status=413)
        parts.append(part)
    return b"".join(parts)


def _ending() -> ApiError:
    return ApiError("the server is ending", status=503)


async def _refused(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.body, status_code=error.status)


async def _left(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=400)  # to a client that left before it had asked, and reads nothing


async def _not_found(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = ApiError(message, status=error.status_code).body
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    body = ApiError(f"the model failed: {error}", status=500).body
    return JSONResponse(body, status_code=500)
