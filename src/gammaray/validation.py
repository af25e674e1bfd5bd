"""Strict pydantic models whose errors name the field and, for an unknown one, the nearest that exists."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

Planned = Mapping[str, tuple[object, ...]]  # key -> values that ask for nothing
UNKNOWN = "unknown_key"
UNSUPPORTED = "unsupported_key"
MAX_ECHO = 60  # characters
MAX_INTEGER: int = 10**MAX_ECHO  # Python refuses to print one of thousands of digits


class Strict(BaseModel):
    """Frozen, no coercion, no unknown keys.

    `planned` maps keys that do not work in this version to the values that ask for nothing: such a
    value is dropped, any other is an error that says so, with the key's entry of `reasons` if it has one.
    `foreign` maps names that other servers have to the key that does the same here: one of this model's,
    or a whole path with dots.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    planned: ClassVar[Planned] = {}
    reasons: ClassVar[Mapping[str, str]] = {}
    foreign: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if cls._keeps(key, value)}

    @classmethod
    def _keeps(cls, key: object, value: object) -> bool:
        if key in _keys(cls):
            return True
        if key not in cls.planned:
            raise PydanticCustomError(UNKNOWN, "unknown key{hint}", _unknown(key, cls))
        if value not in cls.planned[str(key)]:
            raise PydanticCustomError(UNSUPPORTED, "not supported yet{why}{only}", _asked(str(key), cls))
        return False


def path(error: ErrorDetails) -> str:
    """Where the error is: `tenants.chat.speculation.gamma`, `messages[0].content`; '' is the whole."""
    location: list[object] = list(error["loc"])
    if "key" in error.get("ctx", {}):  # the error is about one key of this mapping
        location.append(error["ctx"]["key"])
    parts = (f"[{part}]" if isinstance(part, int) else f".{shorten(str(part))}" for part in location)
    return "".join(parts).lstrip(".")


def explain(error: ErrorDetails) -> str:
    """The error in a sentence, with the value when it is a short scalar."""
    message = error["msg"]
    if error["type"] in (UNKNOWN, UNSUPPORTED, "missing"):
        return message
    value = error["input"]
    return f"{message} (got {value!r})" if _is_short(value) else message


def _is_short(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_ECHO and len(repr(value)) <= MAX_ECHO
    if isinstance(value, int):
        return -MAX_INTEGER < value < MAX_INTEGER
    return isinstance(value, float)


def nearest(word: object, known: Iterable[str]) -> str:
    """'; did you mean ...?' for the closest of `known`, or the whole choice when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(str(word), names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(names) or 'none'}"


def shorten(text: str, limit: int = 100) -> str:
    """What a client sent, short enough to send back."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _keys(model: type[Strict]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _unknown(key: object, model: type[Strict]) -> dict[str, Any]:
    # pydantic fails on a lone surrogate
    name = shorten(str(key)).encode("utf-8", "backslashreplace").decode()
    here = model.foreign.get(name, "")
    meant = f"; did you mean {here!r}?" if "." in here or here in _keys(model) else None
    return {"key": name, "hint": meant or nearest(name, _keys(model))}


def _asked(key: str, model: type[Strict]) -> dict[str, Any]:
    neutral = " or ".join(json.dumps(value) for value in model.planned[key] if value is not None)
    only = f": leave it out or use {neutral}" if neutral else ""
    why = f" ({model.reasons[key]})" if key in model.reasons else ""
    return {"key": key, "only": only, "why": why}
