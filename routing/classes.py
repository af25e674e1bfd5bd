"""Which class of its tenant a request belongs to."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from gammaray.config import Class, Tenant, When
from gammaray.routing.detect import Look, detect
from gammaray.types import Asked


def classify(tenant: Tenant, asked: Asked) -> Class | None:
    """The first class whose conditions hold; None: none, and the request's class is `default`."""

    @cache  # several classes may ask what only one reading of the text tells
    def look() -> Look | None:
        return detect(asked.route, asked.text)

    return next((one for one in tenant.classes if fits(one.when, asked, look)), None)


def fits(when: When, asked: Asked, look: Callable[[], Look | None]) -> bool:
    """All that is set holds. `look` is only called if it decides."""
    return (
        (when.route is None or when.route == asked.route)
        and _is_between(len(asked.prompt), when.prompt_tokens_over, when.prompt_tokens_below)
        and _is_between(asked.temperature, when.temperature_over, when.temperature_below)
        and all(asked.headers.get(name.lower()) == value for name, value in when.header.items())
        and (when.looks_like is None or when.looks_like == look())
    )


def _is_between(value: float, over: float | None, below: float | None) -> bool:
    return (over is None or value > over) and (below is None or value < below)
