"""Which token may come next under a JSON schema or a regular expression, and trees cut down to that.

llguidance does the matching. Token masks depend on the text alone: forced tokens, which would make them
depend on how the text was split into tokens, are off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gammaray.engine.drafters.base import DraftTree
from gammaray.engine.schema import Why, check_regex, read_schema, refused
from gammaray.engine.schema_limits import check_limits
from gammaray.errors import EngineFailure, InvalidRequest, Unprocessable
from gammaray.types import Grammar
from gammaray.validation import shorten

MAX_BYTES = 65_536  # of a schema or regular expression
MAX_REASON = 160  # characters of what the library says; it may quote a whole schema
LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=50_000, verbose_errors=False)
JSON_STYLE = {
    "whitespace_pattern": r"[ \n\r\t]{1,16}",  # between two parts: room to indent, not to go on forever
    "json_allowed_escapes": 'nrbtf\\"',  # \uXXXX would let a listed name be written past its schema
}
FIELDS = {"regex": "structured_outputs.regex"}
PREAMBLE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: |invalid regex .*\(in regex\): )?")
REASONS: tuple[tuple[str, Why, str], ...] = (  # what the library says, and what clients are told
    ("NoExtensionBias", "impossible", "no text follows this grammar"),
    ("Regex is empty", "impossible", "no string follows a pattern together with its format and lengths"),
    ("Unsatisfiable schema", "impossible", ""),
    ("lookarounds not", "unsupported", "\\b, and ^ or $ inside a regular expression, are not supported"),
    ("oneOf constraints", "unsupported", "oneOf: its options must exclude each other by type or by const"),
    ("not disjoint", "unsupported", "patternProperties: no name may match two of them"),
    ("Unable to determine", "oversized", "a pattern is too much work together with its format and lengths"),
    ("supported", "unsupported", ""),
    ("panic", "oversized", "the grammar is too complex"),
    *(
        (words, "oversized", "")
        for words in ("fuel", "precomputation", "too big", "too large", "Too many", "exceed")
    ),
)


class GrammarCompiler:
    """Makes matchers for one checkpoint. May be called from any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = eos
        self._lock = Lock()
        self._vocabulary: Vocabulary | None = None

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of the text; it shares nothing with other requests' matchers.

        Raises InvalidRequest when the grammar is invalid or impossible, holds what is not supported, or
        exceeds a limit; Unprocessable when this checkpoint's tokenizer cannot be used with any.
        """
        try:
            vocabulary = self._load()
            matcher = LLMatcher(vocabulary.tokenizer, _source(grammar), log_level=0, limits=LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()  # nothing allowed is an error, too
            if matcher.is_error():
                raise _rejection(matcher.get_error())
        except InvalidRequest as error:
            error.param = FIELDS.get(grammar.kind, "response_format")
            raise
        return Matcher(matcher, vocabulary)

    def _load(self) -> Vocabulary:
        with self._lock:
            self._vocabulary = self._vocabulary or Vocabulary.of(self._tokenizer, self._vocab_size, self._eos)
            return self._vocabulary


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A checkpoint's tokens as the library knows them."""

    tokenizer: LLTokenizer
    size: int  # V: what is beyond it, the model cannot say
    eos: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos: Collection[int]) -> Vocabulary:
        """Takes about a second for 100,000 tokens. Raises Unprocessable."""
        ends = sorted(token for token in eos if token < vocab_size)
        if not ends:
            raise _unusable("the model has no end-of-sequence token to end a text with")
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise _unusable(f"its tokenizer is a {type(tokenizer).__name__}")
        try:
            known = from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=ends)
        except BaseException as error:  # a panic of the library is no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise _unusable("the bytes of its tokens are unknown") from None
        return cls(known, vocab_size, ends)


class Matcher:
    """Where one sequence stands in its grammar.

    Every method raises EngineFailure once the library has given up on this text, which its limits make it
    do where following on would take too much work.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self.finished = False  # EOS was taken

    def mask(self) -> Tensor:
        """Tokens that may come next, [V] bool; EOS where the text may end. None once finished."""
        size = self._vocabulary.size
        if self.finished:
            return torch.zeros(size, dtype=torch.bool)
        allowed = torch.from_numpy(np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)[:size] != 0)
        allowed[self._vocabulary.eos] = self._matcher.is_accepting()
        self._check()
        return allowed

    def advance(self, token: int) -> bool:
        """Take a token; False, and nothing changes, when mask() does not allow it."""
        if self.finished or not 0 <= token < self._vocabulary.size:
            return False
        if token in self._vocabulary.eos:
            self.finished = self._matcher.is_accepting()
            taken = self.finished
        else:
            taken = bool(self._matcher.try_consume_tokens([token]))
        self._check()
        return taken

    def rollback(self, count: int) -> None:
        """Undo the last `count` successful advances."""
        if count and self.finished:
            self.finished = False
            count -= 1
        self._matcher.rollback(count)
        self._check()

    def copy(self) -> Matcher:
        """One that goes on from here by itself. It fails with this one where the library gives up."""
        copy = Matcher(self._matcher.deep_copy(), self._vocabulary)
        copy.finished = self.finished
        return copy

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineFailure("the text could not be followed through its grammar within the limits")


def prune(tree: DraftTree, matcher: Matcher) -> DraftTree | None:
    """The tree without the nodes that the grammar forbids, and what is below them; None if none is left.

    Only deterministic trees: to judge sampled nodes by their own tokens would change the distribution of
    the output (math.md, section 1). The matcher ends where it was.
    """
    if tree.drawn != "deterministic":
        return tree
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    kept: list[int] = []

    def visit(parent: int) -> None:
        for node in children.get(parent, ()):
            if matcher.advance(tree.tokens[node]):
                kept.append(node)
                try:
                    visit(node)
                finally:
                    matcher.rollback(1)

    visit(-1)
    return tree.subtree(sorted(kept)) if kept else None


@lru_cache(maxsize=64)
def _source(grammar: Grammar) -> str:
    """A grammar in the library's own language."""
    text = '{"type": "object"}' if grammar.kind == "json_object" else grammar.text
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise refused("invalid", "the grammar holds half a surrogate pair") from None
    if size > MAX_BYTES:
        raise refused("oversized", f"the grammar has more than {MAX_BYTES} bytes")
    rule = _regex(text) if grammar.kind == "regex" else _json(text)
    return f'%llguidance {{"no_forcing": true}}\nstart: {rule}'


def _regex(text: str) -> str:
    check_regex(text)
    return f"/{regex_to_lark(text)}/"


def _json(text: str) -> str:
    document, places = read_schema(text)
    check_limits(places)
    return f"%json {json.dumps({**document, 'x-guidance': JSON_STYLE})}"


def _unusable(reason: str) -> Unprocessable:
    return Unprocessable(f"this model cannot follow grammars: {reason}", code="unsupported_grammar")


def _rejection(error: str) -> InvalidRequest:
    """Why the library takes no such grammar, without the grammar that it quotes."""
    syntax = re.search("^error: (.+)$", error, re.MULTILINE)
    reason = shorten(syntax[1] if syntax else PREAMBLE.sub("", error.partition("\n")[0]), MAX_REASON)
    for words, why, message in REASONS:
        if words in reason:
            return refused(why, message or reason)
    return refused("invalid", reason)
