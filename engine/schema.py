"""Which JSON schemas and regular expressions may reach the grammar library: not what it would get wrong.

It refuses most of what it does not support; what is here it ignores or reads inexactly. What it takes too
long for is in engine/schema_limits.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import floor
from typing import Any, Literal

from gammaray.errors import InvalidRequest
from gammaray.validation import shorten

Why = Literal["invalid", "unsupported", "impossible", "oversized"]

DRAFTS = tuple(f"json-schema.org/{name}/schema" for name in ("draft/2020-12", "draft/2019-09", "draft-07"))
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
SCHEMA = ("additionalProperties", "items")  # keywords whose value is a schema
SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED_SCHEMAS = ("$defs", "definitions", "patternProperties", "properties")
COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
BOUNDS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")
NOTES = (  # they assert nothing
    *("$comment", "contentEncoding", "contentMediaType", "default", "deprecated", "description"),
    *("discriminator", "examples", "readOnly", "title", "writeOnly"),
)
VALUES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(SCHEMA, (dict, bool)),
    **dict.fromkeys(SCHEMAS, (list,)),
    **dict.fromkeys(NAMED_SCHEMAS, (dict,)),
    **dict.fromkeys(COUNTS, (int,)),
    **dict.fromkeys((*BOUNDS, "multipleOf"), (int, float)),
    **dict.fromkeys(("$ref", "format", "pattern"), (str,)),
    **dict.fromkeys(("enum", "required"), (list,)),
    **dict.fromkeys(("const", *NOTES), (object,)),
    "type": (str, list),
}
CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # characters that JSON writes as \uXXXX only
CONTROL_ESCAPES = re.compile(r"\\(x|u00|U0{6})([01]\w|7[fF])|\\[xuU]\{0*([01]?\w|7[fF])\}|\\[av]")
MAX_DEPTH = 50  # schemas inside each other; the library's JSON parser stops at 128 brackets
MAX_REGEX = 2048  # characters: work on .*.*.*, and the like, grows with their cube
MAX_EXACT = 2**53  # numbers are held as float64, integers taken from them


@dataclass(frozen=True, slots=True)
class Place:
    """A schema inside a document."""

    schema: Mapping[str, Any]
    pointer: str  # "#/properties/name"
    parent: str  # pointer of the schema around it
    depth: int


def refused(why: Why, message: str) -> InvalidRequest:
    return InvalidRequest(message, code=f"{why}_grammar")


def read_schema(text: str) -> tuple[dict[str, Any], list[Place]]:
    """A document without its header, and every schema in it. `true` is `{}`: any JSON value.

    Raises InvalidRequest when it is no schema, or the library could not follow it exactly.
    """
    try:
        document = json.loads(text)
        json.dumps(document, allow_nan=False)
    except (ValueError, RecursionError):
        raise refused("invalid", "the schema is not JSON, or nests too deeply") from None
    if document is False:
        raise refused("impossible", "no value follows the schema false")
    root = _without_header(document) if isinstance(document, dict) else {} if document is True else document
    places = list(_walk(root))
    _check_references(places)
    for meeting in [places] if any(map(combines, places)) else [[place] for place in places]:
        _check_bounds(meeting)
    return root, places


def combines(place: Place) -> bool:
    """Whether one value may have to follow two schemas."""
    asserting = place.schema.keys() - {*NOTES, "$defs", "definitions"}
    conjuncts = len(asserting - {"allOf"}) + len(place.schema.get("allOf", ()))
    return conjuncts > 1 and bool(asserting & {"$ref", "allOf", "anyOf", "oneOf"})


def check_regex(regex: str) -> None:
    if len(regex) > MAX_REGEX:
        raise refused("oversized", f"a regular expression has more than {MAX_REGEX} characters")
    if re.search(r"(?<!\\)(\\\\)*\\\Z", regex):
        raise refused("invalid", "a regular expression ends in a single backslash")
    if re.search(r"\(\?\w*x", regex):
        raise refused("unsupported", "the flag x of regular expressions is not supported")


def _without_header(document: dict[str, Any]) -> dict[str, Any]:
    draft = document.get("$schema", f"https://{DRAFTS[0]}")
    if not isinstance(draft, str) or re.sub("^https?://|#$", "", draft) not in DRAFTS:
        raise refused("unsupported", f"$schema must be one of {', '.join(DRAFTS)}")
    return {keyword: value for keyword, value in document.items() if keyword not in ("$schema", "$id")}


def _walk(root: object) -> Iterator[Place]:
    """Every schema, behind the one around it."""
    pending: list[tuple[object, str, str, int]] = [(root, "#", "", 1)]
    while pending:
        schema, pointer, parent, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise refused("oversized", f"more than {MAX_DEPTH} schemas are inside each other")
        if not isinstance(schema, dict | bool):
            raise refused("invalid", f"{shorten(pointer)} must be an object, true or false")
        place = Place(schema if isinstance(schema, dict) else {}, pointer, parent, depth)
        for keyword, value in place.schema.items():
            _check_keyword(keyword, value, pointer)
        _check_least_properties(place)
        yield place
        pending += [(inner, at, pointer, depth + 1) for at, inner in _inside(place)]


def _inside(place: Place) -> Iterator[tuple[str, object]]:
    for keyword, value in place.schema.items():
        pointer = f"{place.pointer}/{keyword}"
        if keyword in SCHEMA:
            yield pointer, value
        elif keyword in SCHEMAS:
            yield from ((f"{pointer}/{index}", inner) for index, inner in enumerate(value))
        elif keyword in NAMED_SCHEMAS:
            names = (name.replace("~", "~0").replace("/", "~1") for name in value)
            yield from zip((f"{pointer}/{name}" for name in names), value.values(), strict=True)


def _check_keyword(keyword: str, value: Any, pointer: str) -> None:
    where = shorten(f"{pointer}/{keyword}")
    if keyword not in VALUES:
        raise refused("unsupported", f"{where}: this keyword is not supported")
    fits = isinstance(value, VALUES[keyword]) and not (isinstance(value, bool) and int in VALUES[keyword])
    if not fits:
        raise refused("invalid", f"{where} has a value of the wrong type")
    if keyword == "format" and value not in FORMATS:
        raise refused("unsupported", f"{where} is none of {', '.join(FORMATS)}")
    if keyword == "multipleOf" and not 0 < value < MAX_EXACT:
        raise refused("invalid", f"{where} must be above 0 and below 2**53")
    for pattern in (value,) if keyword == "pattern" else value if keyword == "patternProperties" else ():
        check_regex(pattern)
        _check_literals(pattern)
    if keyword in (*COUNTS, *BOUNDS, "const", "enum") and not all(map(_can_be_written, _leaves(value))):
        raise refused("unsupported", f"{where} holds a number beyond 2**53 or a control character")


def _check_literals(pattern: str) -> None:
    """The library leaves out what it cannot write; of a class, [...], it writes the rest."""
    literals = re.sub(r"\[(\\.|[^\]\\])*\]", "", pattern.replace(r"\\", ""))
    if CONTROL.search(literals) or CONTROL_ESCAPES.search(literals):
        raise refused("unsupported", "a pattern holds a control character outside of [...]")


def _leaves(value: Any) -> Iterator[object]:
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, list | dict):
            pending += value.values() if isinstance(value, dict) else value
        else:
            yield value


def _can_be_written(leaf: object) -> bool:
    if isinstance(leaf, str):
        return not CONTROL.search(leaf)
    return not isinstance(leaf, int | float) or abs(leaf) <= MAX_EXACT


def _check_least_properties(place: Place) -> None:
    """A text may repeat a property that the schema does not list, and the parsed object has it once."""
    if place.schema.get("minProperties", 0) > max(1, len(place.schema.get("required", ()))):
        message = "minProperties above 1 needs as many required properties"
        raise refused("unsupported", f"{shorten(place.pointer)}: {message}")


def _check_references(places: Collection[Place]) -> None:
    pointers = {place.pointer for place in places}
    for place in places:
        if (target := place.schema.get("$ref", "#")) not in pointers:
            raise refused(
                "unsupported", f"$ref {shorten(target)!r} is no schema in this document (#/$defs/...)"
            )


def _check_bounds(places: Collection[Place]) -> None:
    """In a range without another whole number, the library takes an excluded one at its end for inside."""
    bounds = {item for place in places for item in place.schema.items() if item[0] in BOUNDS}
    fractions = {floor(value) for _, value in bounds if value != floor(value)}
    excluded = {
        value for keyword, value in bounds if keyword.startswith("exclusive") and value == floor(value)
    }
    if any(value in fractions or value - 1 in fractions for value in excluded):
        raise refused(
            "unsupported", "an exclusive bound is a whole number, and less than 1 from another bound"
        )
