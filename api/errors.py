"""Every error leaves in OpenAI's shape: {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
import math
import traceback
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from gammaray.api import visit
from gammaray.errors import (
    EngineFailure,
    GammarayError,
    InvalidRequest,
    NotFound,
    Overloaded,
    TooLarge,
    Unauthorized,
)
from gammaray.validation import UNKNOWN, UNSUPPORTED, explain, path, shorten

logger = logging.getLogger(__name__)
FAULT_CODES = {
    UNKNOWN: "unknown_parameter",
    UNSUPPORTED: "unsupported_parameter",
    "missing": "missing_parameter",
}
CODES = {  # by status, of errors that have no code of their own
    400: "invalid_value",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "body_too_large",
    422: "unprocessable",
    429: "rate_limited",
    503: "overloaded",
}
RESPONSES: dict[int | str, dict[str, Any]] = {  # for the OpenAPI document
    "default": {
        "description": "Any failure",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "error": {
                            "type": "object",
                            "properties": {
                                "message": {"type": "string"},
                                "type": {"type": "string"},
                                "param": {"type": ["string", "null"]},
                                "code": {"type": "string"},
                            },
                            "required": ["message", "type", "param", "code"],
                        }
                    },
                    "required": ["error"],
                }
            }
        },
    }
}
MAX_MESSAGE = 1000  # characters
GONE = 499  # nobody reads it; the number is for the access log


def install(app: FastAPI) -> None:
    """Registers a handler for every kind of failure, so that no other shape can leave."""
    app.add_exception_handler(GammarayError, _on_known)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientDisconnect, _on_gone)
    app.add_exception_handler(Exception, _on_unknown)


def body(error: GammarayError) -> dict[str, Any]:
    """The JSON of one error. What a client sent comes back short, and escaped if it is no Unicode."""
    message, param = shorten(error.message, MAX_MESSAGE), error.param and shorten(error.param)
    fields = {"message": message, "type": error.kind, "param": param, "code": code(error)}
    return {"error": {key: _printable(value) for key, value in fields.items()}}


def code(error: Exception) -> str:
    """Never empty, so that clients can rely on it."""
    own, status = getattr(error, "code", None), getattr(error, "status", 500)
    return own or CODES.get(status, "internal_error")


def hide(error: Exception) -> GammarayError:
    """An unexpected failure as a client may see it. The log says where, but not what about.

    The text of an exception may hold a prompt.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    logger.error("request failed: %s at %s", type(error).__name__, places)
    return EngineFailure("the server failed on this request; its log has the details")


def response(error: GammarayError, scope: Scope) -> JSONResponse:
    """The answer to a request that fails before it has an answer."""
    visit.note(scope, code(error))
    return JSONResponse(body(error), error.status, _headers(error))


def _headers(error: GammarayError) -> dict[str, str]:
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, Overloaded):
        return {"Retry-After": f"{max(1, math.ceil(error.retry_after))}"}
    # The rest of the body is still to come, and nobody wants to read it.
    return {"Connection": "close"} if isinstance(error, TooLarge) else {}


async def _on_known(request: Request, error: Exception) -> Response:
    assert isinstance(error, GammarayError)
    return response(error, request.scope)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return response(invalid(error.errors()[0]), request.scope)


def invalid(fault: Any) -> InvalidRequest:
    """One validation fault as a 400 that names the field."""
    if fault["type"] == "json_invalid":
        return InvalidRequest(f"the body is not JSON: {fault['ctx']['error']}", code="invalid_json")
    if fault["loc"] == ("body",) and fault["type"] not in (UNKNOWN, UNSUPPORTED) and _no_object(fault):
        return InvalidRequest("the body must be a JSON object, sent as Content-Type: application/json")
    fault = {**fault, "loc": fault["loc"][1:]}
    where = path(fault)
    return InvalidRequest(
        f"{where}: {explain(fault)}".removeprefix(": "),
        param=where or None,
        code=FAULT_CODES.get(fault["type"]),
    )


def _no_object(fault: Any) -> bool:
    return not isinstance(fault["input"], dict)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    route = f"{shorten(request.method)} {shorten(request.scope['path'])}"
    if error.status_code == 404:
        return response(NotFound(f"there is no route {route}", code="unknown_url"), request.scope)
    wrong = InvalidRequest(f"{route}: {error.detail}", code=CODES.get(error.status_code))
    visit.note(request.scope, code(wrong))
    return JSONResponse(body(wrong), error.status_code, error.headers)


async def _on_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=GONE)


async def _on_unknown(request: Request, error: Exception) -> Response:
    return response(hide(error), request.scope)


def _printable(value: str | None) -> str | None:
    return None if value is None else value.encode("utf-8", "backslashreplace").decode()
