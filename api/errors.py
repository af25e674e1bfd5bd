"""Every error leaves in OpenAI's shape: {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gammaray.errors import EngineFailure, GammarayError, InvalidRequest, NotFound, Overloaded
from gammaray.validation import UNKNOWN, UNSUPPORTED, explain, path

logger = logging.getLogger(__name__)
CODES = {UNKNOWN: "unknown_parameter", UNSUPPORTED: "unsupported_parameter", "missing": "missing_parameter"}


def install(app: FastAPI) -> None:
    """Registers a handler for every kind of failure, so that no other shape can leave."""
    app.add_exception_handler(GammarayError, _on_known)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientDisconnect, _on_gone)
    app.add_exception_handler(Exception, _on_unknown)


def body(error: GammarayError) -> dict[str, Any]:
    """The JSON of one error. Text that is no Unicode (a client's own field name) is escaped."""
    fields = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return {"error": {key: _printable(value) for key, value in fields.items()}}


def hide(error: Exception) -> GammarayError:
    """An unexpected failure as a client may see it; the details go to the log."""
    logger.error("request failed", exc_info=error)
    return EngineFailure("the server failed on this request; its log has the details")


def _response(error: GammarayError, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(body(error), error.status, headers)


async def _on_known(_: Request, error: Exception) -> Response:
    assert isinstance(error, GammarayError)
    wait = error.retry_after if isinstance(error, Overloaded) else None
    return _response(error, None if wait is None else {"Retry-After": f"{max(1, round(wait))}"})


async def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _response(invalid(error.errors()[0]))


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
        code=CODES.get(fault["type"], "invalid_value"),
    )


def _no_object(fault: Any) -> bool:
    return not isinstance(fault["input"], dict)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    route = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return _response(NotFound(f"there is no route {route}", code="unknown_url"))
    wrong = InvalidRequest(f"{route}: {error.detail}")
    return JSONResponse(body(wrong), error.status_code, error.headers)


async def _on_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the number is for the access log


async def _on_unknown(_: Request, error: Exception) -> Response:
    return _response(hide(error))


def _printable(value: str | None) -> str | None:
    return None if value is None else value.encode("utf-8", "backslashreplace").decode()
