"""The access log: one JSON object a line, one line a request, written when the request is over."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from logging.handlers import WatchedFileHandler
from typing import Any

from gammaray.api.visit import Visit
from gammaray.errors import ConfigError
from gammaray.validation import Strict


class AccessLog:
    """Appends to `file`, also when a rotation has moved it. `prompts`: what was asked and answered too."""

    def __init__(self, file: str, prompts: bool) -> None:
        self._prompts = prompts
        try:
            self._handler = WatchedFileHandler(file, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"server.access_log: cannot write {file!r}: {error.strerror}") from None

    def write(
        self, visit: Visit, arrived: datetime, ended: float, http: dict[str, Any], about: str | None = None
    ) -> None:
        """`ended` as the times of `visit`; `http`: method, route and status; `about`: the tenant that an
        operator's request is for."""
        line = {"time": arrived.isoformat(timespec="milliseconds"), "request_id": visit.id, **http}
        line |= _facts(visit, ended, about) | (_texts(visit) if self._prompts else {})
        # ASCII: no character that some reader takes for the end of a line.
        self._handler.handle(logging.makeLogRecord({"msg": json.dumps(line, default=Strict.model_dump)}))


def _facts(visit: Visit, ended: float, about: str | None) -> dict[str, Any]:
    answer = visit.answer
    usage = answer.usage() if answer else {}
    return {
        "tenant": visit.identity.tenant or about,
        "key": visit.identity.key,
        "model": visit.model,
        "response_id": answer.job.id if answer else None,
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "finish_reasons": [choice.finish for choice in answer.choices] if answer else None,
        "ttft_ms": None if visit.first_token is None else _ms(visit.first_token - visit.began),
        "duration_ms": _ms(ended - visit.began),
        "error": visit.error,
    }


def _texts(visit: Visit) -> dict[str, Any]:
    choices = visit.answer.choices if visit.answer else ()
    return {"prompt": visit.prompt, "texts": [choice.text for choice in choices]}


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
