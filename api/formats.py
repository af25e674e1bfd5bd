"""The request fields that ask for a grammar: `response_format` and our own `structured_outputs`."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from gammaray.api import later
from gammaray.types import Grammar
from gammaray.validation import Planned, Strict

MAX_GRAMMAR = 65_536  # bytes
MAX_REGEX = 2048  # characters


def _fits(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(_as_text(schema).encode())
    except ValueError:
        raise PydanticCustomError("schema", "holds a number that JSON does not have") from None
    if size > MAX_GRAMMAR:
        limit = {"limit": MAX_GRAMMAR}
        raise PydanticCustomError("schema", "must have at most {limit} bytes of JSON", limit)
    return schema


def _as_text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class JsonSchema(Strict):
    """`strict` false is taken and enforced all the same: what is generated always follows the schema."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: Annotated[dict[str, Any], AfterValidator(_fits)] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_asked(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "format", "belongs to type 'json_schema', which needs it", {"key": "json_schema"}
            )
        return self

    @property
    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        return Grammar(self.type, _as_text(self.json_schema.schema_) if self.json_schema else "")


class StructuredOutputs(Strict):
    """What OpenAI's `response_format` cannot say."""

    planned: ClassVar[Planned] = later.STRUCTURED_OUTPUTS
    regex: str = Field(min_length=1, max_length=MAX_REGEX)

    @property
    def grammar(self) -> Grammar:
        return Grammar("regex", self.regex)
