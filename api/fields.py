"""Request fields whose JSON comes in several forms: each becomes one form, or an error that names it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from gammaray.validation import Strict, shorten

MAX_INT = 2**31 - 1
MAX_TOP = 20  # best tokens to report beside each
MAX_PROMPTS = 256
MAX_STOPS = 4
MAX_STOP_LENGTH = 256  # characters: each end of the text is compared with each stop string
MAX_STOP_IDS = 64
MAX_BAD_WORDS = 128
MAX_BIASES = 1024
NO_TOOLS = "this version has no tool parser"


def _prompts(value: Any) -> list[str | list[int]]:
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not prompts:
        raise PydanticCustomError("prompt", "must be text, a list of texts, token ids, or lists of token ids")
    if len(prompts) > MAX_PROMPTS:
        raise PydanticCustomError("prompt", "must hold at most {limit} prompts", {"limit": MAX_PROMPTS})
    if not all(isinstance(p, str) for p in prompts) and not all(_is_ids(p) for p in prompts):
        raise PydanticCustomError("prompt", "must not mix texts and token ids, nor hold empty or other lists")
    return prompts


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _stops(value: Any) -> list[str]:
    return _texts([value] if isinstance(value, str) else value, MAX_STOPS)


def _texts(value: Any, most: int) -> list[str]:
    limits = {"most": most, "length": MAX_STOP_LENGTH}
    texts = [] if value is None else value
    if not isinstance(texts, list) or len(texts) > most:
        raise PydanticCustomError("texts", "must be a list of at most {most} texts", limits)
    if not all(isinstance(item, str) and 0 < len(item) <= MAX_STOP_LENGTH for item in texts):
        raise PydanticCustomError("texts", "must hold texts of 1 to {length} characters", limits)
    return texts


def _bad_words(value: Any) -> list[str]:
    return _texts(value, MAX_BAD_WORDS)


def _stop_ids(value: Any) -> list[int]:
    ids = [] if value is None else value
    if not isinstance(ids, list) or len(ids) > MAX_STOP_IDS or (ids and not _is_ids(ids)):
        raise PydanticCustomError("ids", "must be a list of at most {n} token ids", {"n": MAX_STOP_IDS})
    return ids


def _biases(value: Any) -> list[tuple[int, float]]:
    biases = {} if value is None else value
    if not isinstance(biases, dict) or len(biases) > MAX_BIASES:
        raise PydanticCustomError(
            "bias", "must map at most {n} token ids, written as texts, to numbers", {"n": MAX_BIASES}
        )
    return [(_bias_id(key), _bias(number)) for key, number in biases.items()]


def _bias_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
        raise PydanticCustomError("bias", "has a key that is no token id written as a text, like '50256'")
    return int(key)


def _bias(value: Any) -> float:
    if type(value) not in (int, float) or not -100 <= value <= 100:  # NaN fails too
        raise PydanticCustomError("bias", "has a value that is no number from -100 to 100")
    return float(value)


def _content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "must be a text or a list of text parts")
    return "".join(_part(part) for part in value)


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        message = "a content part of type {kind} is not supported yet; use text"
        raise PydanticCustomError("content", message, {"kind": shorten(ascii(kind))})
    if set(part) != {"type", "text"} or not isinstance(part["text"], str):
        raise PydanticCustomError("content", "a text part must have just 'type' and 'text'")
    words: str = part["text"]
    return words


def _role(value: Any) -> Any:
    if value in ("tool", "function"):
        message = "role {role} is not supported yet ({why})"
        raise PydanticCustomError("role", message, {"role": repr(value), "why": NO_TOOLS})
    return "system" if value == "developer" else value


Text = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
Bias = Annotated[float, Field(ge=-100, le=100)]

Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(
        _prompts,
        json_schema_input_type=str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)
        ],
    ),
]
Stops = Annotated[
    list[str],
    PlainValidator(
        _stops, json_schema_input_type=Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None
    ),
]
BadWords = Annotated[
    list[str],
    PlainValidator(
        _bad_words, json_schema_input_type=Annotated[list[Text], Field(max_length=MAX_BAD_WORDS)] | None
    ),
]
StopIds = Annotated[
    list[int],
    PlainValidator(
        _stop_ids, json_schema_input_type=Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None
    ),
]
Biases = Annotated[
    list[tuple[int, float]],
    PlainValidator(
        _biases,
        json_schema_input_type=Annotated[
            dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")], Bias], Field(max_length=MAX_BIASES)
        ]
        | None,
    ),
]


class TextPart(Strict):
    """A content part as clients write it; for the OpenAPI document."""

    type: Literal["text"]
    text: str


Content = Annotated[
    str,
    PlainValidator(_content, json_schema_input_type=str | Annotated[list[TextPart], Field(min_length=1)]),
]
Role = Annotated[
    Literal["system", "user", "assistant"],
    BeforeValidator(_role, json_schema_input_type=Literal["system", "developer", "user", "assistant"]),
]
