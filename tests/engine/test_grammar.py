"""Grammars against independent judges: jsonschema, re, a matcher built afresh, and the definition of a mask.

A random walk takes allowed tokens until one ends the text. Tokens are the 256 bytes and a few pieces that
straddle characters and JSON's parts.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from support.checkpoint import byte_tokenizer
from support.embedded import MODEL, needs_embedded
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gammaray.engine.drafters.base import DraftTree
from gammaray.engine.grammar import MAX_BYTES, GrammarCompiler, Matcher, prune
from gammaray.engine.loading import load_tokenizer
from gammaray.errors import EngineFailure, InvalidRequest, Unprocessable
from gammaray.types import Grammar

PIECES = (
    b'{"',
    b'":',
    b'": "',
    b'", "',
    b'"}',
    b"true",
    b"  ",
    b"\n  ",
    b"ab",
    b"12",
    b"-1",
    b"0.5",
    b"[[",
    b"}}",
)
PIECES += (b"a\xc3", b"\xa9b", b"\xf0\x9f", b"\x98\x80")  # of é and of an emoji
TEXT = [*(bytes([value]) for value in range(256)), *PIECES]  # what each token says
EOS, TURN, TOOL = len(TEXT), len(TEXT) + 1, len(TEXT) + 2  # TURN ends the text as well, TOOL is special too
VOCAB = TOOL + 4  # the last three stand for nothing
ENDS = {EOS, TURN}


def pieces_tokenizer() -> PreTrainedTokenizerFast:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's names of bytes
    moved = {byte: 256 + i for i, byte in enumerate(b for b in range(256) if b not in printable)}
    names = ["".join(chr(moved.get(byte, byte)) for byte in text) for text in TEXT]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate([*names, "<|end|>"])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    extra = ["<|turn|>", "<|tool|>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", additional_special_tokens=extra
    )


COMPILER = GrammarCompiler(pieces_tokenizer(), VOCAB, ENDS)


def regex(pattern: str) -> Grammar:
    return Grammar("regex", pattern)


def schema(document: object) -> Grammar:
    return Grammar("json_schema", json.dumps(document))


def allowed(matcher: Matcher) -> list[int]:
    return [int(token) for token in matcher.mask().nonzero()[:, 0]]


def takes(matcher: Matcher, text: str | bytes) -> bool:
    """Whether the text, byte by byte, and then its end, are allowed. The matcher stays where it is."""
    data = text.encode() if isinstance(text, str) else text
    count = 0
    for token in [*data, EOS]:
        if not matcher.advance(token):
            break
        count += 1
    matcher.rollback(count)
    return count == len(data) + 1


def walk(matcher: Matcher, rng: random.Random, limit: int = 400) -> str | None:
    """Text of a random walk, which likes to close what is open and to end; None when it became too long."""
    text = b""
    for step in range(limit):
        tokens = allowed(matcher)
        assert tokens
        ends = ENDS & set(tokens)
        closing = [token for token in tokens if token < EOS and TEXT[token][:1] in b'"}]']
        if ends and (len(ends) == len(tokens) or rng.random() < 0.3):
            assert matcher.advance(rng.choice(sorted(ends)))
            assert matcher.finished
            return text.decode()
        likes = closing if closing and rng.random() < 0.3 + step / 100 else sorted(set(tokens) - ends)
        token = rng.choice(likes)
        assert matcher.advance(token)
        text += TEXT[token]
    return None


NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["value"],
    "additionalProperties": False,
}
FOLLOWED = [
    {},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": "integer", "minimum": -7, "exclusiveMaximum": 120},
    {"type": "number", "exclusiveMinimum": 0.25, "maximum": 3.5},
    {"type": "integer", "multipleOf": 7, "minimum": 10},
    {"enum": [1, 2.5, 'a\n"é', None, True, [1, {"b": 2}], {"a": None}, 1e-7, ""]},
    {"const": {"x": [1, "😀"], "y": -0.5}},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "pattern": "é"},
    {"type": "string", "pattern": "\\d$", "maxLength": 5},
    {"type": "string", "pattern": "^[^\\x00-\\x1f\\x7f]+$"},
    *({"type": "string", "format": name} for name in ("date", "ipv4", "email", "uuid", "date-time")),
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "b"}], "items": False, "minItems": 2},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "urn:person",
        "title": "Person",
        "type": "object",
        "properties": {"name": {"type": "string", "description": "of a person"}, "age": {"type": "integer"}},
        "required": ["name"],
    },
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"^x": {"type": "null"}},
    },
    {"anyOf": [{"type": "integer", "maximum": 3}, {"type": "object", "required": ["k"], "maxProperties": 1}]},
    {"oneOf": [{"properties": {"kind": {"const": k}}, "required": ["kind"], "type": "object"} for k in "ab"]},
    {
        "allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": {"type": "null"}}}],
        "maxProperties": 2,
    },
    {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    {
        "definitions": {"a/b~": {"type": "boolean"}},
        "type": "array",
        "items": {"$ref": "#/definitions/a~1b~0"},
    },
    {"type": "object", "properties": {"down": {"$ref": "#"}}, "additionalProperties": False},
]


@pytest.mark.parametrize("document", FOLLOWED, ids=lambda document: json.dumps(document)[:60])
def test_what_a_schema_allows_follows_it(document: dict[str, object]) -> None:
    judge = Draft202012Validator(
        {key: value for key, value in document.items() if key != "$schema"}, format_checker=FormatChecker()
    )
    texts = [walk(COMPILER.compile(schema(document)), random.Random(seed)) for seed in range(8)]
    assert any(text is not None for text in texts)
    for text in texts:
        if text is not None:
            judge.validate(json.loads(text))


def test_json_object_allows_any_object_and_nothing_else() -> None:
    matcher = COMPILER.compile(Grammar("json_object"))
    for text in ("{}", '{"a": [1, -2.5e3, true, null, {"b": "\\n\\"é😀"}],\n  "c":{}}', '{ "a" : 1 }'):
        assert takes(matcher, text), text
    for text in ("", "[]", "3", "{", '{"a"}', '{"a":1,}', " {}", "{} ", '{"a":01}', "{'a':1}", '{"a":"\n"}'):
        assert not takes(matcher, text), text
    texts = [walk(COMPILER.compile(Grammar("json_object")), random.Random(seed)) for seed in range(10)]
    assert all(isinstance(json.loads(text), dict) for text in texts if text is not None)


@pytest.mark.parametrize("document", [True, {}, {"title": "anything"}])
def test_an_empty_schema_is_any_json_value(document: object) -> None:
    matcher = COMPILER.compile(schema(document))
    for text in ("null", "-0.5e-3", '"x"', "[[]]", '{"a": {}}'):
        assert takes(matcher, text), text
    assert not takes(matcher, "")
    assert not takes(matcher, "nil")


def test_white_space_comes_to_an_end() -> None:
    """A walk that prefers it at every place still has to go on: a model cannot be stuck in it."""
    matcher = COMPILER.compile(
        schema({"type": "array", "items": {"type": "null"}, "maxItems": 2, "minItems": 2})
    )
    text = b""
    while not matcher.finished:
        tokens = allowed(matcher)
        blank = [token for token in tokens if token < EOS and not TEXT[token].strip()]
        token = (blank or tokens)[-1]
        assert matcher.advance(token)
        text += b"" if token in ENDS else TEXT[token]
    assert text.split() == [b"[", b"null", b",", b"null", b"]"]
    assert max(len(run) for run in re.findall(rb"\s+", text)) == 16


def test_a_listed_name_cannot_be_written_past_its_schema() -> None:
    """llguidance's own default lets the name of an unlisted property be spelt \\u0061."""
    matcher = COMPILER.compile(schema({"type": "object", "properties": {"a": {"type": "integer"}}}))
    assert takes(matcher, '{"a":1}')
    assert not takes(matcher, '{"\\u0061":"x"}')


@pytest.mark.parametrize(
    "pattern",
    [
        "(yes|no|maybe)( [a-z]{1,3}){0,2}\\.?",
        "[^\\n]{0,9}",
        "a*",
        "^ab$",
        "[é-ü]{1,3}😀?",
        "(?i)straße|[0-9]+/\\w?",
        "<\\|tool\\|>",
        "a\nb\t/x",
        "",
        "(a{2}){3}",
    ],
)
def test_what_a_regex_allows_matches_it_whole(pattern: str) -> None:
    texts = [walk(COMPILER.compile(regex(pattern)), random.Random(seed)) for seed in range(12)]
    assert any(text is not None for text in texts)
    for text in texts:
        assert text is None or re.fullmatch(pattern, text), text


GRAMMARS = [
    Grammar("json_object"),
    schema({}),
    schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 5},
                "tags": {"type": "array", "items": {"enum": ["ab", "abba", "é"]}, "maxItems": 2},
                "n": {"type": "number", "minimum": 0, "maximum": 12.5},
            },
            "required": ["n"],
            "additionalProperties": False,
        }
    ),
    schema({"type": "string", "pattern": "^\\w+@(ab|12)$"}),
    regex("(ab|a)*(12)?"),
    regex("\\p{L}{1,4}é?😀"),
    regex("[^\\n]{0,6}"),
]
BUILT = {grammar: COMPILER.compile(grammar) for grammar in GRAMMARS}
STEPS = st.lists(st.integers(0, 10**9), max_size=14)


def somewhere(grammar: Grammar, picks: Sequence[int]) -> tuple[Matcher, list[int]]:
    """A matcher behind some allowed tokens, and those."""
    matcher, path = BUILT[grammar].copy(), []
    for pick in picks:
        tokens = allowed(matcher)
        if not tokens:
            break
        path.append(tokens[pick % len(tokens)])
        assert matcher.advance(path[-1])
    return matcher, path


@given(grammar=st.sampled_from(GRAMMARS), picks=STEPS)
def test_a_mask_is_the_set_of_tokens_that_advance_takes(grammar: Grammar, picks: list[int]) -> None:
    matcher, _ = somewhere(grammar, picks)
    mask, taken = matcher.mask(), []
    for token in range(-2, VOCAB + 2):
        if matcher.advance(token):
            taken.append(token)
            matcher.rollback(1)
    assert taken == allowed(matcher)
    assert torch.equal(matcher.mask(), mask)
    assert mask.shape == (VOCAB,)
    assert mask.dtype == torch.bool
    assert bool(taken) != matcher.finished


@given(grammar=st.sampled_from(GRAMMARS), data=st.data())
def test_a_matcher_is_where_a_new_one_gets_by_the_same_tokens(grammar: Grammar, data: st.DataObject) -> None:
    """Model-based: whatever was tried, undone or copied on the way leaves no trace."""
    matcher, path = BUILT[grammar].copy(), list[int]()
    others: list[tuple[Matcher, list[int]]] = []
    for step in data.draw(
        st.lists(st.sampled_from(["take", "take", "try", "undo", "copy", "swap"]), max_size=14)
    ):
        if step == "take" and (tokens := allowed(matcher)):
            path.append(data.draw(st.sampled_from(tokens)))
            assert matcher.advance(path[-1])
        elif step == "try" and matcher.advance(token := data.draw(st.integers(0, VOCAB - 1))):
            path.append(token)
        elif step == "undo":
            kept = data.draw(st.integers(0, len(path)))
            matcher.rollback(len(path) - kept)
            del path[kept:]
        elif step == "copy":
            others.append((matcher.copy(), list(path)))
        elif step == "swap" and others:
            others.append((matcher, path))
            matcher, path = others.pop(0)
    for used, tokens in [*others, (matcher, path)]:
        fresh = COMPILER.compile(grammar)
        assert all(fresh.advance(token) for token in tokens)
        assert torch.equal(used.mask(), fresh.mask())
        assert used.finished == fresh.finished


def test_the_mask_depends_on_the_text_and_not_on_its_tokens() -> None:
    split = BUILT[GRAMMARS[0]].copy()
    joined = split.copy()
    assert all(split.advance(token) for token in b'{"ab": "')
    assert all(joined.advance(TEXT.index(piece)) for piece in (b'{"', b"ab", b'": "'))
    assert torch.equal(split.mask(), joined.mask())
    assert len(allowed(COMPILER.compile(schema({"const": "abab"})))) == 1
    assert allowed(BUILT[GRAMMARS[0]]) == [ord("{"), TEXT.index(b'{"')]


def test_characters_may_be_split_over_tokens() -> None:
    matcher = COMPILER.compile(regex("aéb😀"))
    tokens = [TEXT.index(piece) for piece in (b"a\xc3", b"\xa9b", b"\xf0\x9f", b"\x98\x80")]
    for count, token in enumerate(tokens):
        assert not matcher.mask()[[EOS, TURN]].any(), count
        assert matcher.advance(token)
    assert set(allowed(matcher)) == ENDS
    assert not takes(COMPILER.compile(regex("é")), b"\xc3")


def test_the_end_is_allowed_where_the_text_may_end_and_nothing_after_it() -> None:
    matcher = COMPILER.compile(regex("a|ab"))
    assert not ENDS & set(allowed(matcher))
    assert not matcher.advance(EOS)
    assert matcher.advance(ord("a"))
    assert set(allowed(matcher)) == {ord("b"), *ENDS}
    for end in sorted(ENDS):
        assert matcher.advance(end)
        assert matcher.finished
        assert allowed(matcher) == []
        assert not any(matcher.advance(token) for token in (ord("b"), EOS, TURN))
        assert matcher.copy().finished
        matcher.rollback(1)
        assert not matcher.finished
    assert matcher.advance(ord("b"))
    assert set(allowed(matcher)) == ENDS
    assert matcher.advance(TURN)
    matcher.rollback(3)
    assert allowed(matcher) == [ord("a"), TEXT.index(b"ab")]


def test_special_tokens_and_padding_are_no_text() -> None:
    for pattern in ("(?s).*", "<\\|tool\\|>", "[^a]*"):
        matcher = COMPILER.compile(regex(pattern))
        assert not matcher.mask()[EOS + 2 :].any()
        assert not any(matcher.advance(token) for token in range(TOOL, VOCAB))
    assert takes(COMPILER.compile(regex("<\\|tool\\|>")), "<|tool|>")


def test_a_vocabulary_smaller_than_the_tokenizer_s_limits_the_mask() -> None:
    matcher = GrammarCompiler(pieces_tokenizer(), EOS + 1, ENDS).compile(regex("a*"))
    assert matcher.mask().shape == (EOS + 1,)
    assert not matcher.advance(TURN)
    assert matcher.advance(EOS)


# Trees -------------------------------------------------------------------------------------------------


def path_to(tree: DraftTree, node: int) -> list[int]:
    tokens = []
    while node >= 0:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tokens[::-1]


def by_enumeration(tree: DraftTree, grammar: Grammar, before: Sequence[int]) -> list[int]:
    """Nodes whose whole path a new matcher takes."""

    def follows(node: int) -> bool:
        matcher = COMPILER.compile(grammar)
        return all(matcher.advance(token) for token in [*before, *path_to(tree, node)])

    return [node for node in range(len(tree)) if follows(node)]


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    size = draw(st.integers(1, 9))
    likely = st.sampled_from([*b'ab1"{}: ', *(TEXT.index(p) for p in (b'{"', b"ab", b"12")), EOS, TURN, TOOL])
    return DraftTree(
        tokens=tuple(draw(likely) for _ in range(size)),
        parents=tuple(draw(st.integers(-1, node - 1)) for node in range(size)),
        confidence=draw(st.sampled_from([None, tuple(node / size for node in range(size))])),
        q_ids=draw(st.sampled_from([None, torch.arange(2 * size).reshape(size, 2)])),
    )


@given(grammar=st.sampled_from(GRAMMARS), picks=st.lists(st.integers(0, 10**9), max_size=3), tree=trees())
def test_pruning_keeps_exactly_the_paths_of_the_grammar(
    grammar: Grammar, picks: list[int], tree: DraftTree
) -> None:
    matcher, before = somewhere(grammar, picks)
    mask = matcher.mask()
    kept = by_enumeration(tree, grammar, before)
    pruned = prune(tree, matcher)
    assert torch.equal(matcher.mask(), mask)
    if pruned is None:
        assert kept == []
        return
    assert [path_to(pruned, node) for node in range(len(pruned))] == [path_to(tree, node) for node in kept]
    assert all(parent < node for node, parent in enumerate(pruned.parents))
    assert pruned.confidence == (tree.confidence and tuple(tree.confidence[node] for node in kept))
    assert (pruned.q_ids is None) == (tree.q_ids is None)
    if pruned.q_ids is not None and tree.q_ids is not None:
        assert torch.equal(pruned.q_ids, tree.q_ids[kept])


def test_nothing_stays_below_the_end_of_the_text() -> None:
    a, b = b"ab"
    tree = DraftTree(
        tokens=(a, EOS, a, b, EOS, b), parents=(-1, 0, 1, 0, 3, 4), confidence=(6, 5, 4, 3, 2, 1)
    )
    pruned = prune(tree, COMPILER.compile(regex("ab?")))
    assert pruned == DraftTree(tokens=(a, EOS, b, EOS), parents=(-1, 0, 0, 2), confidence=(6, 5, 3, 2))
    finished = COMPILER.compile(regex("a"))
    assert finished.advance(a)
    assert finished.advance(EOS)
    assert prune(tree, finished) is None
    assert finished.finished


@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
def test_sampled_trees_are_left_alone(drawn: str) -> None:
    tree = DraftTree(tokens=(ord("z"),), parents=(-1,), drawn=drawn)
    assert prune(tree, COMPILER.compile(regex("a"))) is tree


def test_the_matcher_is_left_where_it_was_when_pruning_fails() -> None:
    class Breaking(Matcher):
        left = 3

        def advance(self, token: int) -> bool:
            self.left -= 1
            if not self.left:
                raise EngineFailure("planted")
            return super().advance(token)

    matcher = COMPILER.compile(regex("a*"))
    breaking = Breaking(matcher._matcher, matcher._vocabulary)
    with pytest.raises(EngineFailure, match="planted"):
        prune(DraftTree(tokens=(ord("a"),) * 4, parents=(-1, 0, 1, 2)), breaking)
    breaking.left = 1000
    assert torch.equal(breaking.mask(), COMPILER.compile(regex("a*")).mask())
    with pytest.raises(AssertionError):
        breaking.rollback(1)


# Refusals ----------------------------------------------------------------------------------------------


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
    {"maxLength": True},
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
    {"allOf": [{"type": "string", "pattern": "(.*%s.*){3}" % c} for c in "abcdefghijklmnopqrst"]},
    {"allOf": [{"anyOf": [{"required": [f"{c}{i}"]} for c in "ab"]} for i in range(30)]},
    {"patternProperties": {f"^{i:02}": {} for i in range(65)}},
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
    ("regex", "(" * 1000 + ")" * 1000, "invalid"),
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


@pytest.mark.parametrize(
    "text",
    [
        *("(((((a|b|cd){1,100}){1,100}){1,100}){1,100}){1,100}", "a{4294967295}", "(a?){10000}a{10000}"),
        *("(x+x+)+y" * 200, "(a|b)*a(a|b){500}", "(" * 240 + "a" + ")" * 240, "\\p{Any}{0,99999}"),
        *map(
            json.dumps,
            (
                {"type": "array", "minItems": 10**9, "items": {"type": "array", "maxItems": 10**9}},
                {"type": "string", "minLength": 10**9},
                {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}},
                {"anyOf": [{"type": "array", "maxItems": i} for i in range(1500)]},
                {"type": "object", "maxProperties": 10**15},
                json.loads(nested(49)),
                patterns(128),
                patterns(3, type="string", minLength=2, maxLength=99),
                {
                    "type": "object",
                    "patternProperties": {f"^{i:02}(\\w{{1,99}}x){{1,99}}$": {} for i in range(64)},
                },
                {
                    "$defs": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}] * 40}},
                    "$ref": "#/$defs/a",
                },
            ),
        ),
    ],
    ids=lambda text: text[:40],
)
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
    grammar = regex("(.*a.{100}|.*b.{101}|.*c.{102})*")
    failing, other = COMPILER.compile(grammar), COMPILER.compile(grammar)
    rng = random.Random(0)
    with pytest.raises(EngineFailure) as failure:
        while failing.mask().any():
            assert failing.advance(rng.choice(b"abc"))
    assert len(failure.value.message) < 100
    calls: list[Callable[[], object]] = [failing.mask, failing.copy().mask, lambda: failing.advance(97)]
    for call in [*calls, lambda: failing.rollback(1)]:
        with pytest.raises(EngineFailure):
            call()
    assert other.mask().any()
    assert COMPILER.compile(grammar).advance(ord("a"))


# Fuzz --------------------------------------------------------------------------------------------------

KEYWORDS = "type enum const anyOf oneOf allOf not items prefixItems minItems maxItems properties required "
KEYWORDS += (
    "additionalProperties patternProperties minProperties maxProperties minLength maxLength pattern format "
)
KEYWORDS += (
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf $ref $defs $schema $id title x-guidance"
)
WORDS = st.sampled_from(
    [*KEYWORDS.split(), "string", "object", "array", "integer", "#", "#/$defs/a", "date", "^a+$", "a"]
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False) | WORDS | st.text(max_size=4)
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(WORDS, inner, max_size=5)
        | st.fixed_dictionaries({"type": st.sampled_from(["object", "array", "string", "number"])}).flatmap(
            lambda base: st.dictionaries(WORDS, inner, max_size=4).map(lambda more: {**more, **base})
        )
    ),
    max_leaves=12,
)
SYNTAX = st.text(st.sampled_from("ab(|)*+?{}[]^$.\\dwpsLxu01,9-&<>:!=é\n/ "), max_size=24)


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


# Checkpoints -------------------------------------------------------------------------------------------


def test_threads_compile_at_once() -> None:
    compiler = GrammarCompiler(pieces_tokenizer(), VOCAB, ENDS)
    with ThreadPoolExecutor(8) as pool:
        masks = list(pool.map(lambda grammar: compiler.compile(grammar).mask(), GRAMMARS * 8))
    assert all(
        torch.equal(mask, BUILT[grammar].mask()) for mask, grammar in zip(masks, GRAMMARS * 8, strict=True)
    )


def test_a_checkpoint_that_grammars_cannot_serve_says_so() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    wordly = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    for compiler in (GrammarCompiler(byte_tokenizer(), 300, ()), GrammarCompiler(wordly, 2, (1,))):
        for _ in range(2):
            with pytest.raises(Unprocessable):
                compiler.compile(Grammar("json_object"))


@needs_embedded
def test_the_embedded_model_s_tokens() -> None:
    tokenizer = load_tokenizer(MODEL)
    size, rng = len(tokenizer), random.Random(0)
    compiler = GrammarCompiler(tokenizer, size, {tokenizer.eos_token_id})
    document = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "people": {"type": "integer", "minimum": 0},
        },
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    texts = []
    for _ in range(6):
        matcher, ids = compiler.compile(schema(document)), list[int]()
        while not matcher.finished:
            tokens = allowed(matcher)
            token = tokenizer.eos_token_id if tokenizer.eos_token_id in tokens else rng.choice(tokens)
            ids.append(token)
            assert matcher.advance(token)
        texts.append(tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False))
    for text in texts:
        Draft202012Validator(document).validate(json.loads(text))
    matcher = compiler.compile(schema(document))
    assert all(
        matcher.advance(token) for token in tokenizer.encode('{"city": "Zür', add_special_tokens=False)
    )
    mask = matcher.mask()
    for token in range(size):
        taken = matcher.advance(token)
        assert taken == bool(mask[token]), token
        matcher.rollback(int(taken))
    assert int(mask.sum()) > 10_000
    assert not mask[tokenizer.all_special_ids].any()
