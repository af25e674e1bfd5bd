"""A tokenizer whose tokens straddle characters and JSON's parts, and walks through what a grammar allows."""

from __future__ import annotations

import json
import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gammaray.engine.grammar import GrammarCompiler, Matcher
from gammaray.types import Grammar

PIECES = (
    *(
        b'{"',
        b'":',
        b'": "',
        b'", "',
        b'"}',
        b"[[",
        b"}}",
        b"  ",
        b"\n  ",
        b"true",
        b"12",
        b"-1",
        b"0.5",
        b"ab",
    ),
    *(b"a\xc3", b"\xa9b", b"\xf0\x9f", b"\x98\x80"),  # of é and of an emoji
)
TEXT = [*(bytes([value]) for value in range(256)), *PIECES]  # what each token says
BROKEN = len(TEXT)  # has a name that stands for no bytes
EOS, TURN, TOOL = BROKEN + 1, BROKEN + 2, BROKEN + 3  # TURN ends the text as well, TOOL is special too
VOCAB = TOOL + 4  # the last three are padding
ENDS = {EOS, TURN}


def pieces_tokenizer() -> PreTrainedTokenizerFast:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's names of bytes
    moved = {byte: 256 + i for i, byte in enumerate(b for b in range(256) if b not in printable)}
    names = ["".join(chr(moved.get(byte, byte)) for byte in text) for text in TEXT]
    vocab = {name: i for i, name in enumerate([*names, "a name", "<|end|>"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
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
    tokens: list[int] = matcher.mask().nonzero()[:, 0].tolist()
    return tokens


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
