"""What each token of the checkpoint's vocabulary says: exact bytes, and a text for answers."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gammaray.api.client import Tokenizer

REPLACEMENT = "\ufffd"
BYTE_FALLBACK = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's tokens of one byte


def _byte_level() -> dict[str, int]:
    """The byte behind each character of a byte-level BPE name (GPT-2): itself, if printable."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_LEVEL = _byte_level()


@dataclass(frozen=True, slots=True)
class Token:
    """`raw`: the bytes it adds to a text. A special token adds none, and its `text` is its name."""

    text: str
    raw: bytes
    special: bool = False


class Vocabulary:
    """The tokenizer, and its tokens, which are looked at one by one and remembered."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._tokens: dict[int, Token] = {}

    def token(self, index: int) -> Token:
        if index not in self._tokens:
            self._tokens[index] = self._look(index)
        return self._tokens[index]

    def text(self, ids: Sequence[int]) -> str:
        """Text of ids with the names of special tokens, short of bytes that are none."""
        return self._decode(ids, skip_special=False).replace(REPLACEMENT, "")

    @cached_property
    def longest(self) -> int:
        """Bytes of a prompt's text that one token can stand for."""
        names = self.tokenizer.get_vocab().items()
        longest = 1
        for most, index in sorted(((len(name.encode()), index) for name, index in names), reverse=True):
            if most <= longest:  # a name is never shorter than what it stands for
                break
            token = self.token(index)
            longest = max(longest, len(token.text.encode() if token.special else token.raw))
        return longest

    def _look(self, index: int) -> Token:
        text = self._behind_text(index, skip_special=True)
        if not text and (name := self._behind_text(index, skip_special=False)):
            return Token(name, b"", special=True)
        raw = self._raw(index) or text.encode() if REPLACEMENT in text else text.encode()
        return Token(_shown(raw), raw)

    def _raw(self, index: int) -> bytes | None:
        """Bytes of a token that begins or ends inside a character; None if its name does not tell."""
        name = self.tokenizer.convert_ids_to_tokens(index) or ""
        if fallback := BYTE_FALLBACK.fullmatch(name):
            return bytes.fromhex(fallback[1])
        return bytes(BYTE_LEVEL[c] for c in name) if all(c in BYTE_LEVEL for c in name) else None

    @cached_property
    def _anchor(self) -> list[int]:
        return self.tokenizer.encode("a", add_special_tokens=False)

    def _behind_text(self, index: int, skip_special: bool) -> str:
        """What it adds to a text: as the first of one, it might lose a space."""
        before = self._decode(self._anchor, skip_special)
        return self._decode([*self._anchor, index], skip_special)[len(before) :]

    def _decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )


def _shown(raw: bytes) -> str:
    r"""Bytes that are no text on their own are written in OpenAI's way, `bytes:\xe2\x80`."""
    text = raw.decode("utf-8", "replace")
    return text if REPLACEMENT not in text else "bytes:" + raw.decode("ascii", "backslashreplace")


class TextPosition:
    """Characters of a text before the token that comes next. `names`: the text shows special tokens."""

    def __init__(self, start: int = 0, names: bool = False) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._names = names
        self.characters = start

    def step(self, token: Token) -> int:
        """The position of this token, before moving behind it."""
        before = self.characters
        raw = token.text.encode() if token.special and self._names else token.raw
        self.characters += len(self._decoder.decode(raw))
        return before
