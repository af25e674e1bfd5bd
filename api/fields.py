"""Request fields whose JSON comes in several forms: each becomes one form, or an error that names it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainValidator
from pydantic_core import PydanticCustomError

MAX_STOPS = 4
MAX_PROMPTS = 256


def _prompts(value: Any) -> list[str | list[int]]:
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not prompts:
        raise PydanticCustomError("prompt", "must be text, a list of texts, token ids, or lists of token ids")
    if len(prompts) > MAX_PROMPTS:
        raise PydanticCustomError("prompt", "must hold at most {limit} prompts", {"limit": MAX_PROMPTS})
    if not all(isinstance(p, str) for p in prompts) and not all(_is_ids(p) for p in prompts):
        raise PydanticCustomError("prompt", "must not mix texts and token ids, nor hold empty or other lists")
    return [_text(p) if isinstance(p, str) else p for p in prompts]


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise PydanticCustomError("stop", "must be a text or a list of at most {n} texts", {"n": MAX_STOPS})
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise PydanticCustomError("stop", "must hold texts that are not empty")
    return [_text(stop) for stop in stops]


def _content(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "must be a text or a list of text parts")
    return "".join(_part(part) for part in value)


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        text = "a content part of type {kind} is not supported yet; use text"
        raise PydanticCustomError("content", text, {"kind": repr(kind)})
    if set(part) != {"type", "text"} or not isinstance(part["text"], str):
        raise PydanticCustomError("content", "a text part must have just 'type' and 'text'")
    return _text(part["text"])


def _text(value: str) -> str:
    """JSON can escape half a surrogate pair, which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "is not valid Unicode (a lone surrogate)") from None
    return value


def _role(value: Any) -> Any:
    if value in ("tool", "function"):
        raise PydanticCustomError("role", "role {role} is not supported yet", {"role": repr(value)})
    return "system" if value == "developer" else value


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Stops = Annotated[list[str], PlainValidator(_stops, json_schema_input_type=str | list[str] | None)]
Content = Annotated[
    str, PlainValidator(_content, json_schema_input_type=str | list[dict[Literal["type", "text"], str]])
]
Role = Annotated[
    Literal["system", "user", "assistant"],
    BeforeValidator(_role, json_schema_input_type=Literal["system", "developer", "user", "assistant"]),
]
