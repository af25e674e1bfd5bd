"""The HTTP application over an EngineClient: OpenAI's routes, two probes and the operator's routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.telemetry import TelemetryConfig
from opentelemetry import trace
from starlette.middleware import Middleware

from gammaray import __version__
from gammaray.api import errors, job, operator, prompt, visit
from gammaray.api.auth import OPERATOR
from gammaray.api.body import BodyLimit, StrictRoute
from gammaray.api.client import EngineClient, Planner, Tokenizer
from gammaray.api.dashboard import add_dashboard
from gammaray.api.drain import Drain, Entrance
from gammaray.api.gate import Gate, Record, RequestId, Tell
from gammaray.api.job import Terms
from gammaray.api.log import AccessLog
from gammaray.api.operator import Conversations, Operations
from gammaray.api.respond import respond
from gammaray.api.schema import ChatBody, CompletionBody, GenerationBody
from gammaray.api.shape import CHAT, COMPLETION
from gammaray.api.tenancy import Tenancy
from gammaray.api.tokens import Vocabulary
from gammaray.api.visit import Visit
from gammaray.api.warmup import WarmUps
from gammaray.config import Config
from gammaray.errors import GammarayError, NotFound, Overloaded
from gammaray.telemetry.tracing import request_span
from gammaray.types import Asked, ModelInfo
from gammaray.validation import shorten

READY_TIMEOUT_S = 5.0
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or with `stream` its events", "content": {"text/event-stream": {}}}
}
COMPLETION_MAX_TOKENS = 16  # OpenAI's default on this route
# FastAPI would begin a trace of its own, apart from Serve's, with the query string in it.
UNTRACED: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
TRACER = trace.get_tracer("gammaray")
T = TypeVar("T")


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    planner: Planner,
    config: Config,
    drain: Drain | None = None,
    tell_ids: bool = True,
    clock: Callable[[], float] = time.monotonic,
    tenancy: Tenancy | None = None,
    operations: Operations | None = None,
    metrics: Callable[[], bytes] | None = None,
    conversations: Conversations | None = None,
    tell: Tell | None = None,
) -> FastAPI:
    """Routes and error handlers. Nothing is asked of the engine before the first request.

    `drain`: how its end is announced. `tell_ids` False: a proxy puts request ids into responses. `clock`
    (s) counts rate limits, unless `tenancy` brings them, which may change while the server runs. Without
    `operations` there are no operator routes but `health`, and no live page. `metrics`: the text of
    `/metrics`, which may take a while. `conversations` are for warm-ups. `tell` hears of every request that
    is over. Raises ConfigError when the access log cannot be written.
    """
    drain, vocabulary = drain or Drain(), Vocabulary(tokenizer)
    app = FastAPI(
        title="gammaray",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=errors.RESPONSES,
        middleware=_way_in(config, drain, tell_ids, tenancy or Tenancy(config, clock), tell),
        telemetry=UNTRACED,
    )
    app.router.route_class = StrictRoute
    errors.install(app)
    _add_probes(app, client)
    _add_operator(app, client)
    if operations:
        app.include_router(operator.routes(operations))
        add_dashboard(app, operations, drain)
    if conversations:
        warm_ups = WarmUps(client, vocabulary, planner, drain)
        app.include_router(operator.warm_up_routes(warm_ups, conversations, planner))
    if metrics:
        _add_metrics(app, metrics)
    _add_models(app, config)
    _add_generation(app, client, vocabulary, planner, config)
    return app


def _way_in(
    config: Config, drain: Drain, tell_ids: bool, tenancy: Tenancy, tell: Tell | None
) -> list[Middleware]:
    """What every request passes on its way to a route, in this order."""
    server = config.server
    log = AccessLog(server.access_log, config.telemetry.log_prompts) if server.access_log else None
    return [
        Middleware(RequestId, tell=tell_ids),
        Middleware(Record, seconds=server.request_timeout_s, log=log, tell=tell),
        Middleware(Entrance, drain=drain),
        Middleware(BodyLimit, limit=server.max_body_bytes),
        Middleware(Gate, tenancy=tenancy),
    ]


def _add_probes(app: FastAPI, client: EngineClient) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """This process lives."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        """The model answers; 503 until it does."""
        info = await _in_time(client.info())
        return {"status": "ready", "model": info.name, "dtype": info.dtype, "device": info.device}


def _add_operator(app: FastAPI, client: EngineClient) -> None:
    @app.get(f"{OPERATOR}/health", include_in_schema=False)
    async def health() -> dict[str, Any]:
        """What this server is, and how its engine is."""
        about: dict[str, Any] = {"status": "ok", "version": __version__, "reason": None}
        about |= {"engine": None, "model": None}
        try:
            about["engine"] = asdict(await _in_time(client.health()))
            about["model"] = asdict(await _in_time(client.info()))
        except GammarayError as error:
            about |= {"status": "unavailable", "reason": error.message}
        return about


def _add_metrics(app: FastAPI, metrics: Callable[[], bytes]) -> None:
    @app.get("/metrics", include_in_schema=False)
    async def scrape() -> Response:
        """For Prometheus."""
        return Response(await asyncio.to_thread(metrics), media_type=PROMETHEUS)


async def _in_time(answer: Awaitable[T]) -> T:
    try:
        return await asyncio.wait_for(answer, READY_TIMEOUT_S)
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


def _check_model(name: str, config: Config) -> None:
    if name != config.target.model:
        message = f"there is no model {shorten(ascii(name))}; this server has {config.target.model!r}"
        raise NotFound(message, param="model", code="model_not_found")


class _KnownModel:
    """Asks once: a replica that comes back has the same model."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._info: ModelInfo | None = None

    async def info(self) -> ModelInfo:
        if self._info is None:
            self._info = await _in_time(self._client.info())
        return self._info


async def _until_end() -> AsyncIterator[ExitStack]:
    """What is entered here is left when the whole answer was sent, or nobody waits for it any more."""
    with ExitStack() as stack:
        yield stack


UntilEnd = Annotated[ExitStack, Depends(_until_end)]


def _add_generation(
    app: FastAPI, client: EngineClient, vocabulary: Vocabulary, planner: Planner, config: Config
) -> None:
    model = _KnownModel(client)

    @app.post("/v1/completions", response_model=None, responses=STREAMS)
    async def completions(body: CompletionBody, request: Request, until_end: UntilEnd) -> Response:
        """Continues one or more prompts."""
        seen = visit.of(request.scope)
        terms = _accept(body, body.prompt, seen, config, planner, COMPLETION_MAX_TOKENS)
        async with seen.in_time():
            info = await model.info()
            # In a thread, here and below: a long prompt takes seconds, in which other streams must go on.
            inputs = await asyncio.to_thread(prompt.completion_inputs, body, vocabulary, info)
        asked = job.ask(body, inputs, terms.tenant, request.headers)
        planned = until_end.enter_context(planner.open(asked))
        traced = until_end.enter_context(_traced(asked))
        made = job.build(body, inputs, asked, planned, info, terms, traced)
        return await respond(request, client, made, body, COMPLETION)

    @app.post("/v1/chat/completions", response_model=None, responses=STREAMS)
    async def chat(body: ChatBody, request: Request, until_end: UntilEnd) -> Response:
        """Answers a conversation, until the model stops or its context ends."""
        seen = visit.of(request.scope)
        terms = _accept(body, body.messages, seen, config, planner, None)
        async with seen.in_time():
            info = await model.info()
            inputs = await asyncio.to_thread(prompt.chat_inputs, body, vocabulary, info)
        asked = job.ask(body, inputs, terms.tenant, request.headers)
        planned = until_end.enter_context(planner.open(asked))
        traced = until_end.enter_context(_traced(asked))
        made = job.build(body, inputs, asked, planned, info, terms, traced)
        return await respond(request, client, made, body, CHAT)


def _traced(asked: Asked) -> AbstractContextManager[str | None]:
    """What the engine's spans hang on; None: the request is not traced."""
    return request_span(TRACER, asked.tenant, asked.route, asked.request_id, asked.headers.get("traceparent"))


def _accept(
    body: GenerationBody,
    asked: object,
    seen: Visit,
    config: Config,
    planner: Planner,
    default_tokens: int | None,
) -> Terms:
    """Notes what is asked and for how long, and says what the tenant grants. Raises NotFound."""
    _check_model(body.model, config)
    seen.model, seen.prompt = body.model, asked
    tenant, notes = seen.identity.tenant, seen.shorten(body.timeout)
    assert tenant is not None, "the gate lets nobody else pass"
    return Terms(tenant, default_tokens, planner.limits(tenant).max_tokens, notes)
