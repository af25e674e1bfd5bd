"""The HTTP application over an EngineClient: OpenAI's routes and two probes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import FastAPI, Request, Response

from gammaray import __version__
from gammaray.api import errors, job, prompt
from gammaray.api.client import EngineClient, Planner, Tokenizer
from gammaray.api.respond import respond
from gammaray.api.schema import ChatBody, CompletionBody
from gammaray.api.shape import CHAT, COMPLETION
from gammaray.config import Config
from gammaray.errors import NotFound, Overloaded
from gammaray.types import ModelInfo

READY_TIMEOUT_S = 5.0
COMPLETION_MAX_TOKENS = 16  # OpenAI's default on this route


def create_app(client: EngineClient, tokenizer: Tokenizer, planner: Planner, config: Config) -> FastAPI:
    """Routes and error handlers. Nothing is asked of the engine before the first request."""
    app = FastAPI(title="gammaray", version=__version__, docs_url=None, redoc_url=None)
    errors.install(app)
    _add_probes(app, client)
    _add_models(app, config)
    _add_generation(app, client, tokenizer, planner, config)
    return app


def _add_probes(app: FastAPI, client: EngineClient) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """This process lives."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        """The model answers; 503 until it does."""
        info = await _answering(client)
        return {"status": "ready", "model": info.name, "dtype": info.dtype, "device": info.device}


def _check_model(name: str, config: Config) -> None:
    if name != config.target.model:
        message = f"there is no model {name!r}; this server has {config.target.model!r}"
        raise NotFound(message, param="model", code="model_not_found")


class _KnownModel:
    """Asks once: a replica that comes back has the same model."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._info: ModelInfo | None = None

    async def info(self) -> ModelInfo:
        if self._info is None:
            self._info = await _answering(self._client)
        return self._info


async def _answering(client: EngineClient) -> ModelInfo:
    try:
        return await asyncio.wait_for(client.info(), READY_TIMEOUT_S)
    except TimeoutError:
        raise Overloaded("the model is not ready yet; try again") from None


def _add_models(app: FastAPI, config: Config) -> None:
    name = config.target.model
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "gammaray"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model of this server."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> dict[str, Any]:
        """That model again; 404 for any other name."""
        _check_model(model, config)
        return card


def _add_generation(
    app: FastAPI, client: EngineClient, tokenizer: Tokenizer, planner: Planner, config: Config
) -> None:
    model = _KnownModel(client)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continues one or more prompts."""
        _check_model(body.model, config)
        info = await model.info()
        # In a thread, here and below: a long prompt takes seconds, in which other streams must go on.
        prompts = [
            await asyncio.to_thread(prompt.completion_ids, text, tokenizer, info) for text in body.prompt
        ]
        made = job.build("cmpl", body, prompts, planner, info, COMPLETION_MAX_TOKENS)
        return await respond(request, client, made, body, COMPLETION)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answers a conversation, until the model stops or its context ends."""
        _check_model(body.model, config)
        info = await model.info()
        prompts = [await asyncio.to_thread(prompt.chat_ids, body.messages, tokenizer, info)]
        made = job.build("chatcmpl", body, prompts, planner, info, None)
        return await respond(request, client, made, body, CHAT)
