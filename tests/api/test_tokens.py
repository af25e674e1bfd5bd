"""What single tokens say, with the three kinds of tokenizers."""

from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st
from support.checkpoint import EOS, byte_tokenizer
from support.embedded import MODEL, needs_embedded
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from gammaray.api.tokens import TextPosition, Token, Vocabulary

TEXTS = [
    "",
    "Hello world",
    "  two  spaces ",
    "naïve café",
    "漢字かな",
    "🧑‍🚀 done 😀",
    "a\n\tb\r\n",
    "\u2028x",
    "\ufffd!",
]


@cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: a space is part of the next token, what is unknown becomes bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "t", "h", "e", "o", "l", "▁t", "▁th", "▁the", "lo", "é", "▁▁"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("l", "o"), ("▁", "▁")]
    core = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@cache
def byte_level() -> PreTrainedTokenizerFast:
    return byte_tokenizer(extra=2)


@cache
def embedded() -> PreTrainedTokenizerFast:
    from gammaray.engine.loading import load_tokenizer

    return load_tokenizer(MODEL)


def spelt(vocabulary: Vocabulary, ids: list[int]) -> bytes:
    return b"".join(vocabulary.token(i).raw for i in ids)


@given(st.text() | st.sampled_from(TEXTS))
def test_bytes_of_tokens_join_to_the_text(text: str) -> None:
    byte, piece = Vocabulary(byte_level()), Vocabulary(sentencepiece())
    assert spelt(byte, byte.tokenizer.encode(text)) == text.encode()
    ids = piece.tokenizer.encode(text, add_special_tokens=False)
    assert spelt(piece, ids) == (" " + text if text else "").encode()


@needs_embedded
@given(text=st.text() | st.sampled_from(TEXTS), ids=st.lists(st.integers(0, 49151), max_size=12))
def test_bytes_of_the_embedded_tokenizer(text: str, ids: list[int]) -> None:
    vocabulary = Vocabulary(embedded())
    for some in (vocabulary.tokenizer.encode(text), ids):  # it has no tokens for some control characters
        decoded = vocabulary.tokenizer.decode(some, skip_special_tokens=True)
        assert spelt(vocabulary, some).decode(errors="replace") == decoded
    assert all("\ufffd" not in vocabulary.token(i).text for i in ids)


def test_how_tokens_are_shown() -> None:
    piece, byte = Vocabulary(sentencepiece()), Vocabulary(byte_level())
    name = piece.tokenizer.convert_tokens_to_ids
    assert piece.token(name("▁the")) == Token(" the", b" the")
    assert piece.token(name("<0xE6>")) == Token("bytes:\\xe6", b"\xe6")
    assert piece.token(name("<0x0A>")) == Token("\n", b"\n")
    assert piece.token(name("</s>")) == Token("</s>", b"", special=True)
    eos = byte.tokenizer.eos_token_id
    assert byte.token(eos) == Token(EOS, b"", special=True)
    assert byte.token(byte.tokenizer.encode("ß")[1]).text == "bytes:\\x9f"
    assert byte.token(10**6) == Token("", b"")  # a model may have more rows than its tokenizer has tokens


@needs_embedded
def test_part_of_a_character_behind_plain_text() -> None:
    vocabulary = Vocabulary(embedded())
    tokens = [vocabulary.token(i) for i in range(len(vocabulary.tokenizer))]
    mixed = [t for t in tokens if t.text.startswith("bytes: ")]
    assert mixed and all(t.raw.startswith(b" ") for t in mixed)
    assert {t.text for t in tokens if t.special} >= {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}


def test_the_longest_token() -> None:
    assert Vocabulary(sentencepiece()).longest == len("<unk>")
    assert Vocabulary(byte_level()).longest == len(EOS)


def test_text_of_ids_shows_special_tokens_and_no_broken_character() -> None:
    vocabulary = Vocabulary(byte_level())
    ids = vocabulary.tokenizer.encode("aß")
    assert vocabulary.text(ids) == "aß"
    assert vocabulary.text([*ids[:-1], vocabulary.tokenizer.eos_token_id]) == f"a{EOS}"


def test_positions_count_characters_and_wait_for_whole_ones() -> None:
    position = TextPosition(start=3)
    raws = [b"a", b" \xf0\x9f", b"\x98\x80", b"", b"b"]
    assert [position.step(Token("", raw)) for raw in raws] == [3, 4, 5, 6, 6]
    assert position.step(Token("<s>", b"", special=True)) == 7
    assert position.characters == 7
    names = TextPosition(names=True)
    names.step(Token("<s>", b"", special=True))
    assert names.characters == 3
