"""Grammars that are refused, the limits, and what any input may lead to."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pieces import COMPILER, allowed, regex, schema, walk

from gammaray.engine.grammar import MAX_BYTES
from gammaray.engine.schema import COUNTS, FORMATS, VALUES
from gammaray.errors import EngineFailure, InvalidRequest
from gammaray.types import Grammar


def nested(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


def chain(links: int) -> dict[str, object]:
    definitions = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(links)}
    return {"$defs": {**definitions, f"d{links}": {}}, "$ref": "#/$defs/d0"}


def patterns(count: int, **siblings: object) -> dict[str, object]:
    return {"anyOf": [{"type": "string", "pattern": f"^{i}$"} for i in range(count)], **siblings}


IMPOSSIBLE = [
    False,
    {"enum": []},
    {"anyOf": []},
    {"anyOf": [False, False]},
    {"type": []},
    {"type": "string", "minLength": 5, "maxLength": 3},
    {"type": "string", "const": 3},
    {"type": "string", "pattern": "^a$", "minLength": 2},
    {"type": "number", "minimum": 3, "maximum": 1},
    {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
    {"type": "integer", "minimum": 1, "maximum": 2, "multipleOf": 3},
    {"type": "array", "minItems": 3, "maxItems": 2},
    {"type": "array", "items": False, "minItems": 1},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"type": "object", "required": ["a"], "additionalProperties": False},
    {"type": "object", "required": ["a"], "maxProperties": 0},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
]
UNSUPPORTED = [
    *(
        {keyword: {}}
        for keyword in ("not", "if", "contains", "propertyNames", "unevaluatedItems", "nullable")
    ),
    {"type": "array", "uniqueItems": True},
    {"type": "string", "maxLenght": 3},
    {"$defs": {"unused": {"additionalItems": False}}},
    {"x-guidance": {"lenient": True}},
    {"type": "string", "format": "regex"},
    {"type": "integer", "format": "int32"},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "pattern": "a\\b"},
    {"type": "string", "pattern": "(?x) a"},
    {"type": "string", "pattern": "a\\x01"},
    {"type": "string", "pattern": "^a\u0001$"},
    {"patternProperties": {"\\u{1}": {}}},
    {"oneOf": [{"type": "string"}, {"minLength": 3}]},
    {"type": "object", "minProperties": 2},
    {"type": "object", "minProperties": 1, "properties": {"a": {}}},
    {"patternProperties": {"^a": {}, "b$": {}}},
    {"const": 2**53 + 1},
    {"enum": [[{"a": -(2**60)}]]},
    {"type": "integer", "maximum": 2**63},
    {"type": "integer", "enum": [1e20]},
    {"const": "a\u0001"},
    {"enum": ["\u007f"]},
    {"type": "number", "exclusiveMinimum": 3, "maximum": 3.5},
    {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0},
    {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.25}]},
    {"$ref": "https://example.org/schema"},
    {"$ref": "#anchor"},
    {"$ref": "#/$defs/none", "$defs": {}},
    {"$schema": "http://json-schema.org/draft-04/schema#"},
    {"$schema": 7},
]
INVALID = [
    [],
    3,
    "string",
    {"type": "strin"},
    {"type": 3},
    {"type": "array", "items": [{}]},
    {"properties": {"a": 3}},
    {"properties": []},
    {"type": "string", "minLength": -1},
    {"type": "integer", "minLength": "3"},
    {"type": "integer", "maxLength": True},
    {"multipleOf": 0},
    {"multipleOf": -2},
    {"required": "a"},
    {"enum": {}},
    {"$ref": 3},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "a\\"},
    {"patternProperties": {"[": {}}},
    {"const": "\ud800"},
]
OVERSIZED = [
    {"enum": ["x" * MAX_BYTES]},
    {"enum": [f"v{i}" for i in range(100_000)]},
    chain(200),
    patterns(129),
    patterns(4, type="string"),
    {"allOf": [{"type": "string", "pattern": f"(.*{c}.*){{3}}"} for c in "abcdefghijklmnopqrst"]},
    {"allOf": [{"anyOf": [{"required": [f"{c}{i}"]} for c in "ab"]} for i in range(30)]},
    {"patternProperties": {f"^{i:02}": {} for i in range(65)}},
    {"anyOf": [{"type": "array", "maxItems": i} for i in range(257)]},
    {"enum": [[i] for i in range(257)]},
    {"allOf": [{"oneOf": [{"type": "array", "maxItems": 9 * i + j} for i in range(9)]} for j in range(2)]},
    {"type": "object", "properties": {f"p{i}": {} for i in range(65)}, "minProperties": 1},
    {"allOf": [{"minProperties": 1}, {"properties": {f"p{i}": {} for i in range(65)}}]},
    {
        "type": "object",
        "required": [f"p{i}" for i in range(3000)],
        "additionalProperties": {"const": [0] * 90},
    },
    {"type": "integer", "multipleOf": 9_699_690},
    {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]},
    {"multipleOf": 1e-12},
    {"type": "string", "pattern": "a" * 2049},
    {"type": "string", "pattern": "^(a|b)*a(a|b){25}$", "minLength": 5000},
]
TEXTS = [
    ("json_schema", "", "invalid"),
    ("json_schema", "{", "invalid"),
    ("json_schema", '{"minimum": NaN}', "invalid"),
    ("json_schema", '{"minimum": 1e999}', "invalid"),
    ("json_schema", '{"minimum": ' + "1" * 5000 + "}", "invalid"),
    ("json_schema", "[" * 30_000, "invalid"),
    ("json_schema", nested(10_000), "oversized"),
    ("json_schema", nested(50), "oversized"),
    ("json_schema", '{"const":' + "[" * 200 + "]" * 200 + "}", "oversized"),
    ("regex", "[^\\s\\S]", "impossible"),
    ("regex", "[a&&b]", "impossible"),
    ("regex", "(a", "invalid"),
    ("regex", "a)", "invalid"),
    ("regex", "[", "invalid"),
    ("regex", "*", "invalid"),
    ("regex", "a{2,1}", "invalid"),
    ("regex", "a{99999999999}", "invalid"),
    ("regex", "\\N", "invalid"),
    ("regex", "ab\\", "invalid"),
    ("regex", "ab\\\\\\", "invalid"),
    ("regex", "(?-u:\\xff)", "invalid"),
    ("regex", "\ud800", "invalid"),
    ("regex", "(" * 1000 + ")" * 1000, "oversized"),
    ("regex", "(?=a)a", "unsupported"),
    ("regex", "(a)\\1", "unsupported"),
    ("regex", "\\ba", "unsupported"),
    ("regex", "a$b", "unsupported"),
    ("regex", "(?ix) a", "unsupported"),
    ("regex", "a" * 2049, "oversized"),
    ("regex", "a" * (MAX_BYTES + 1), "oversized"),
    ("regex", ".*" * 1024, "oversized"),
    ("regex", "\\w?" * 682, "oversized"),
]
REFUSED = TEXTS + [
    ("json_schema", json.dumps(document), why)
    for why, documents in (
        ("impossible", IMPOSSIBLE),
        ("unsupported", UNSUPPORTED),
        ("invalid", INVALID),
        ("oversized", OVERSIZED),
    )
    for document in documents
]


@pytest.mark.parametrize(("kind", "text", "why"), REFUSED, ids=[f"{text[:40]!a}" for _, text, _ in REFUSED])
def test_what_cannot_be_followed_is_refused(kind: str, text: str, why: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        COMPILER.compile(Grammar(kind, text))
    error = refusal.value
    assert (error.status, error.code) == (400, f"{why}_grammar"), error.message
    assert error.param == ("structured_outputs.regex" if kind == "regex" else "response_format")
    assert 10 < len(error.message) <= 200
    assert "\n" not in error.message
    assert not re.search("panic|backtrace|state>|JSON schema:|llguidance", error.message)


REPEATED_REFERENCES = {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}] * 40}}
LARGE = [
    "(((((a|b|cd){1,100}){1,100}){1,100}){1,100}){1,100}",
    "a{4294967295}",
    "(a?){10000}a{10000}",
    "(x+x+)+y" * 200,
    "(a|b)*a(a|b){500}",
    "(" * 240 + "a" + ")" * 240,
    "\\p{Any}{0,99999}",
]
LARGE_SCHEMAS = [
    {"type": "array", "minItems": 10**9, "items": {"type": "array", "maxItems": 10**9}},
    {"type": "string", "minLength": 10**9},
    {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}},
    {"properties": {f"p{i}": {} for i in range(64)}, "minProperties": 1, "additionalProperties": False},
    {"type": "object", "maxProperties": 10**15},
    {"type": "object", "patternProperties": {f"^{i:02}(\\w{{1,99}}x){{1,99}}$": {} for i in range(64)}},
    {"anyOf": [{"type": "array", "maxItems": i} for i in range(256)]},
    {"anyOf": [*({"const": i} for i in range(300)), *({"enum": [f"v{i}"]} for i in range(300))]},
    {"anyOf": [{"type": ["integer", "null"], "minimum": i} for i in range(300)]},
    {"type": "integer", "multipleOf": 9973},
    {"$defs": REPEATED_REFERENCES, "$ref": "#/$defs/a"},
    json.loads(nested(49)),
    patterns(128),
    patterns(3, type="string", maxLength=99),
]


@pytest.mark.parametrize("text", [*LARGE, *map(json.dumps, LARGE_SCHEMAS)], ids=lambda text: text[:40])
def test_what_is_large_within_the_limits_is_followed_or_given_up(text: str) -> None:
    grammar = Grammar("json_schema" if text.startswith("{") else "regex", text)
    matcher = COMPILER.compile(grammar)
    try:
        walk(matcher, random.Random(0), limit=40)
    except EngineFailure:
        with pytest.raises(EngineFailure):
            matcher.mask()


def test_the_deepest_references_fit_a_small_stack() -> None:
    """Without the limit their compilation overflows the stack, which ends the process."""
    threading.stack_size(4 << 20)
    try:
        with ThreadPoolExecutor(1) as small:
            assert small.submit(COMPILER.compile, schema(chain(131))).result().mask().any()
    finally:
        threading.stack_size(0)


def test_one_text_that_is_given_up_leaves_the_others_alone() -> None:
    grammar = regex("((\\w{1,99}x?){1,99})*")
    failing, other = COMPILER.compile(grammar), COMPILER.compile(grammar)
    rng = random.Random(0)
    with pytest.raises(EngineFailure) as failure:
        while failing.mask().any():
            assert failing.advance(rng.choice(b"abcx12"))
    assert len(failure.value.message) < 100
    calls: list[Callable[[], object]] = [failing.mask, failing.copy().mask, lambda: failing.advance(97)]
    for call in [*calls, lambda: failing.rollback(1)]:
        with pytest.raises(EngineFailure):
            call()
    assert other.mask().any()
    assert COMPILER.compile(grammar).advance(ord("a"))


# Fuzz --------------------------------------------------------------------------------------------------

WORDS = st.sampled_from([*VALUES, "not", "$schema", "x-guidance", "a", "^a+$", "#", "#/$defs/a", "date"])
TYPES = st.sampled_from(["object", "array", "string", "number", "integer", "null"])
SCALARS = st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False) | st.text(max_size=4)
SCALARS |= WORDS | TYPES


def likely(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """Schemas whose keywords mostly have values of the right type."""
    names, few = st.sampled_from(["a", "b", "^a", "é"]), st.lists(inner, min_size=1, max_size=3)
    named, count, number = st.dictionaries(names, inner, max_size=3), st.integers(0, 4), st.integers(-3, 9)
    values = {
        **dict.fromkeys(VALUES, inner),
        **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems", "enum"), few),
        **dict.fromkeys(("properties", "patternProperties", "$defs"), named),
        **dict.fromkeys(COUNTS, count),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "multipleOf"), number),
        **{"type": TYPES, "pattern": SYNTAX, "format": st.sampled_from(FORMATS), "$ref": st.just("#")},
        **{"required": st.lists(names, max_size=2), "additionalProperties": st.booleans() | inner},
    }
    return st.lists(st.sampled_from(sorted(values)), max_size=4, unique=True).flatmap(
        lambda keywords: st.fixed_dictionaries({keyword: values[keyword] for keyword in keywords})
    )


SYNTAX = st.text(st.sampled_from("ab(|)*+?{}[]^$.\\dwpsLxu01,9-&<>:!=é\n/ "), max_size=24)
SCHEMAS = st.recursive(
    SCALARS | st.fixed_dictionaries({"type": TYPES}),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5) | likely(inner),
    max_leaves=12,
)


@settings(max_examples=400)
@given(
    grammar=st.builds(Grammar, st.just("json_schema"), SCHEMAS.map(json.dumps))
    | st.builds(Grammar, st.just("json_schema"), st.text(max_size=40))
    | st.builds(Grammar, st.just("regex"), SYNTAX | st.text(max_size=12))
    | st.builds(Grammar, st.just("regex"), st.binary(max_size=12).map(lambda data: data.decode("latin-1"))),
    picks=st.lists(st.integers(0, 10**9), max_size=4),
)
def test_any_input_is_compiled_or_refused(grammar: Grammar, picks: list[int]) -> None:
    try:
        matcher = COMPILER.compile(grammar)
    except InvalidRequest as error:
        assert error.code
        assert len(error.message) <= 200
        return
    for pick in picks:
        tokens = allowed(matcher)
        if matcher.finished:
            break
        assert tokens
        assert matcher.advance(tokens[pick % len(tokens)])
