"""How large a JSON schema may be. The library has limits of its own, which do not cover what is here.

Beyond each of these it was seen to work for seconds or minutes, or to end the process: each is well below
where that begins. Counts are over the document; where two schemas may meet in one value, fewer are allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from math import lcm
from typing import Any

from gammaray.engine.schema import Place, combines, refused

STACK = 400  # schemas inside each other, also through $ref: 5 KiB of the thread's stack each
PATTERNS, PATTERNS_MET = 128, 3  # met: the work is a product of as many factors
NAME_PATTERNS = 64  # compared in pairs
OPTIONS, OPTIONS_MET = 256, 16  # arrays and objects to choose from: quadratic. Met: a product
LEAST_OF = 64  # properties of which minProperties asks for any: cubic
MULTIPLE = 10_000  # states that divide
DECIMALS = 6  # from 10 on the library's integers overflow
SCALARS = ("boolean", "integer", "null", "number", "string")


def check_limits(places: Sequence[Place]) -> None:
    """Raises InvalidRequest, code oversized_grammar."""
    meets = any(map(combines, places))
    for what, count, limit in _counts(places, meets):
        if count > limit:
            where = " where schemas meet (allOf, or keywords beside $ref, anyOf or oneOf)" if meets else ""
            raise refused("oversized", f"a schema may have at most {limit} {what}{where}")


def _counts(places: Sequence[Place], meets: bool) -> Iterator[tuple[str, int, int]]:
    yield "schemas inside each other, also through $ref", _stack(places), STACK
    names = [name for place in places for name in place.schema.get("patternProperties", ())]
    yield "patternProperties", len(names), NAME_PATTERNS
    patterns = {*names, *(place.schema["pattern"] for place in places if "pattern" in place.schema)}
    yield "different patterns", len(patterns), PATTERNS_MET if meets else PATTERNS
    options = sum(map(_options, places))
    yield "arrays and objects in anyOf, oneOf and enum", options, OPTIONS_MET if meets else OPTIONS
    counted = [place for place in places if place.schema.get("minProperties")]
    properties = [
        len(place.schema.get("properties", ())) for place in (places if meets and counted else counted)
    ]
    yield "properties under minProperties", sum(properties), LEAST_OF
    steps = {Decimal(str(place.schema["multipleOf"])) for place in places if "multipleOf" in place.schema}
    decimals = max((-int(step.normalize().as_tuple().exponent) for step in steps), default=0)
    yield "decimals in multipleOf", decimals, DECIMALS
    multiple = lcm(*(int(step.scaleb(max(decimals, 0))) for step in steps))
    yield "units of the last decimal as common multiple of all multipleOf", multiple, MULTIPLE


def _stack(places: Collection[Place]) -> int:
    """How many can be entered at most, where each $ref is followed once."""
    heights = {place.pointer: 1 for place in places}
    for place in sorted(places, key=lambda place: -place.depth):
        if place.parent:
            heights[place.parent] = max(heights[place.parent], heights[place.pointer] + 1)
    targets = {place.schema["$ref"] for place in places if "$ref" in place.schema}
    return sum(heights[pointer] for pointer in {"#", *targets})


def _options(place: Place) -> int:
    options = [*place.schema.get("anyOf", ()), *place.schema.get("oneOf", ())]
    values = [value for value in place.schema.get("enum", ()) if isinstance(value, list | dict)]
    return len(values) + sum(not _is_scalar(option) for option in options)


def _is_scalar(option: bool | Mapping[str, Any]) -> bool:
    if isinstance(option, bool):
        return False
    if "const" in option:
        return not isinstance(option["const"], list | dict)
    types = option.get("type", "object")
    return "enum" in option or all(name in SCALARS for name in ([types] if isinstance(types, str) else types))
