"""Grammars against independent judges: jsonschema, re, a matcher built afresh, and what a mask is."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from support.checkpoint import byte_tokenizer
from support.embedded import MODEL, needs_embedded
from support.pieces import (
    BROKEN,
    COMPILER,
    ENDS,
    EOS,
    TEXT,
    TOOL,
    TURN,
    VOCAB,
    allowed,
    pieces_tokenizer,
    regex,
    schema,
    takes,
    walk,
)
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gammaray.engine.drafters.base import DraftTree, Drawn
from gammaray.engine.grammar import GrammarCompiler, Matcher, prune
from gammaray.engine.loading import load_tokenizer
from gammaray.errors import EngineFailure, Unprocessable
from gammaray.types import Grammar

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
    {"type": "string", "pattern": "^.{0,2}é$"},
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
    {
        "oneOf": [
            {"properties": {"kind": {"const": k}}, "required": ["kind"], "type": "object"} for k in "ab"
        ],
        "discriminator": {"propertyName": "kind"},
    },
    {
        "type": "object",
        "properties": {
            "a": {"type": "number", "exclusiveMinimum": 0},
            "b": {"type": "number", "maximum": 0.5},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    },
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
        "(?i)yes|[0-9]+/[a-c]?",
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
        others = [BROKEN, *range(TOOL, VOCAB)]
        assert not matcher.mask()[others].any()
        assert not any(matcher.advance(token) for token in others)
    assert takes(COMPILER.compile(regex("<\\|tool\\|>")), "<|tool|>")


def test_a_token_with_a_text_may_end_texts_too_and_is_not_read_then() -> None:
    end = TEXT.index(b"ab")
    matcher = GrammarCompiler(pieces_tokenizer(), VOCAB, {end}).compile(regex("abab?"))
    for token in b"aba":
        assert allowed(matcher) == [token]
        assert not matcher.advance(end)
        assert matcher.advance(token)
    assert allowed(matcher) == [ord("b"), end]
    assert matcher.advance(end)
    assert matcher.finished


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


def grow(data: st.DataObject, grammar: Grammar, before: Sequence[int]) -> DraftTree:
    """A tree of which about half the nodes are allowed behind their parents."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(data.draw(st.integers(1, 8))):
        parents.append(data.draw(st.integers(-1, node - 1)))
        matcher = BUILT[grammar].copy()
        path = path_to(DraftTree(tuple(tokens), tuple(parents)), parents[-1])
        follows = all(matcher.advance(token) for token in [*before, *path])
        known = (allowed(matcher) if follows else []) or [0]
        tokens.append(data.draw(st.sampled_from(known) | st.sampled_from([ord("a"), EOS, TOOL])))
    return DraftTree(
        tokens=tuple(tokens),
        parents=tuple(parents),
        confidence=data.draw(st.sampled_from([None, tuple(node / 8 for node in range(len(tokens)))])),
        q_ids=data.draw(st.sampled_from([None, torch.arange(2 * len(tokens)).reshape(-1, 2)])),
    )


@given(grammar=st.sampled_from(GRAMMARS), picks=st.lists(st.integers(0, 10**9), max_size=3), data=st.data())
def test_pruning_keeps_exactly_the_paths_of_the_grammar(
    grammar: Grammar, picks: list[int], data: st.DataObject
) -> None:
    matcher, before = somewhere(grammar, picks)
    tree = grow(data, grammar, before)
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


def test_the_order_of_the_nodes_that_stay_is_kept() -> None:
    a, b, z = b"abz"
    tree = DraftTree(tokens=(a, z, b, b, a), parents=(-1, -1, -1, 0, 2), confidence=(5, 4, 3, 2, 1))
    pruned = prune(tree, COMPILER.compile(regex("[ab]{2}")))
    assert pruned == DraftTree(tokens=(a, b, b, a), parents=(-1, -1, 0, 1), confidence=(5, 3, 2, 1))


@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
def test_sampled_trees_are_left_alone(drawn: Drawn) -> None:
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

    matcher = COMPILER.compile(regex("a1b"))
    breaking = Breaking(matcher._matcher, matcher._vocabulary)
    with pytest.raises(EngineFailure, match="planted"):
        prune(DraftTree(tokens=tuple(b"a1b"), parents=(-1, 0, 1)), breaking)
    assert allowed(matcher) == [ord("a")]


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
            with pytest.raises(Unprocessable, match="this model cannot follow grammars") as refusal:
                compiler.compile(Grammar("json_object"))
            assert refusal.value.param == "response_format"


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
