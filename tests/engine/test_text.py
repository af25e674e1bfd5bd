"""Delivered text: nothing early, nothing twice, ids and text always together."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from support.tape import Letters, Pieces

from gammaray.engine.text import OutputText


class Bytes:
    """One token a byte: the hardest case for UTF-8."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class Words:
    """Tokens are strings, as if each were a vocabulary entry."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[i] for i in ids)


def run(output: OutputText, ids: Sequence[int], sizes: Sequence[int]) -> list[tuple[list[int], str]]:
    """Deliver in blocks of the given sizes, as rounds would."""
    chunks, rest = [], list(ids)
    for size in [*sizes, len(rest)]:
        for token in rest[:size]:
            if output.push(token):
                return [*chunks, output.take(final=True)]
        rest = rest[size:]
        chunks.append(output.take(final=False))
    return [*chunks, output.take(final=True)]


texts = st.text(alphabet="aß漢😀 h", max_size=12)


@given(text=texts, sizes=st.lists(st.integers(1, 6), max_size=8))
def test_chunks_join_to_the_whole_text_without_replacement_characters(text: str, sizes: list[int]) -> None:
    ids = list(text.encode())
    chunks = run(OutputText(Bytes()), ids, sizes)
    assert "".join(chunk for _, chunk in chunks) == text
    assert [i for part, _ in chunks for i in part] == ids
    assert all(chunk == bytes(part).decode() for part, chunk in chunks)


@given(
    text=texts,
    stop=st.text(alphabet="aß漢 h", min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 6), max_size=8),
)
def test_a_stop_string_is_found_wherever_it_lies_in_a_block(text: str, stop: str, sizes: list[int]) -> None:
    output = OutputText(Bytes(), [stop])
    chunks = run(output, list(text.encode()), sizes)
    assert "".join(chunk for _, chunk in chunks) == text.split(stop)[0]
    assert output.stopped == (stop in text)


def test_the_earliest_of_two_stop_strings_wins() -> None:
    chunks = run(OutputText(Words("a", "xb c", "d"), ["c", "b"]), [0, 1, 2], [])
    assert "".join(text for _, text in chunks) == "ax"


def test_ids_are_cut_with_the_text() -> None:
    """vllm#47616: text was trimmed, ids were not."""
    output = OutputText(Words("so", " ha"), [" ha ha ha"])
    chunks = run(output, [0, 1, 1, 1, 1], [1, 1, 1, 1])
    assert [i for ids, _ in chunks for i in ids] == [0]
    assert "".join(text for _, text in chunks) == "so"


def test_a_token_that_holds_text_before_the_stop_string_stays() -> None:
    output = OutputText(Words("end.\n", "\nUser"), ["\n\nUser"])
    chunks = run(output, [0, 1], [1])
    assert chunks[0] == ([], "")  # the newline may begin the stop string
    assert chunks[-1] == ([0], "end.")


def test_the_beginning_of_a_stop_string_is_released_when_it_does_not_come() -> None:
    chunks = run(OutputText(Words("a", "b", "c"), ["abd"]), [0, 1, 2], [1, 1])
    assert chunks[0] == chunks[1] == ([], "")
    assert chunks[2] == ([0, 1, 2], "abc")


def test_a_character_that_never_became_whole_has_no_text() -> None:
    first_byte = "漢".encode()[0]
    chunks = run(OutputText(Bytes()), [104, first_byte], [2])
    assert chunks == [([104], "h"), ([], ""), ([first_byte], "")]


def test_bytes_that_are_no_text_do_not_hold_the_stream_up() -> None:
    chunks = run(OutputText(Bytes()), [0xFF] * 8, [4])
    assert chunks[0][0] == [0xFF]
    assert len(chunks[1][0]) == 4


@given(text=st.text(alphabet="aé漢😀", max_size=10), cuts=st.lists(st.integers(1, 3), max_size=30))
def test_tokens_that_end_inside_characters_lose_nothing(text: str, cuts: list[int]) -> None:
    raw, pieces = text.encode(), []
    for size in [*cuts, *[1] * 40]:
        if raw:
            pieces.append(raw[:size])
            raw = raw[size:]
    chunks = run(OutputText(Pieces(*pieces)), range(len(pieces)), [1] * len(pieces))
    assert "".join(chunk for _, chunk in chunks) == text


def test_text_before_an_incomplete_last_character_is_delivered() -> None:
    chunks = run(OutputText(Pieces(b"ab ", b"x\xe6")), [0, 1], [1])
    assert "".join(chunk for _, chunk in chunks) == "ab x"


def test_an_emoji_after_bytes_that_are_no_text_is_whole() -> None:
    chunks = run(OutputText(Bytes()), [0xFF, 0xFF, *"😀".encode()], [1] * 6)
    assert "".join(chunk for _, chunk in chunks).endswith("😀")


class Spaced:
    """Like SentencePiece: a leading space of the whole is dropped, and so are special tokens."""

    words = ("▁Hello", "<s>", "▁world")

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[i] for i in ids if i != 1).replace("▁", " ").removeprefix(" ")


def test_a_special_token_in_between_costs_no_space() -> None:
    chunks = run(OutputText(Spaced()), [0, 1, 1, 2], [1, 1, 1])
    assert "".join(chunk for _, chunk in chunks) == "Hello world"


def test_an_end_token_is_delivered_without_text() -> None:
    output = OutputText(Words("a", "</s>"))
    output.push(0)
    output.end(1)
    assert output.take(final=True) == ([0, 1], "a")


def test_a_resumed_sequence_delivers_only_what_is_new() -> None:
    output = OutputText(Words("a", "b"))
    output.push(0)
    output.push(0)
    assert output.skip() == 2
    output.push(1)
    assert output.take(final=False) == ([1], "b")


def test_the_first_word_keeps_its_space_behind_a_prompt() -> None:
    output = OutputText(Spaced(), prompt=[0])
    output.push(2)
    assert output.take(final=True) == ([2], " world")


@given(
    text=st.text(alphabet="aß漢 ", max_size=10),
    stop=st.text(alphabet="aß漢", min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 5), max_size=10),
)
def test_the_ids_that_a_stop_string_leaves_do_not_depend_on_the_rounds(
    text: str, stop: str, sizes: list[int]
) -> None:
    """Else speculation would change which ids are delivered."""

    def delivered(rounds: list[int]) -> list[int]:
        chunks = run(OutputText(Bytes(), [stop]), list(text.encode()), rounds)
        return [i for ids, _ in chunks for i in ids]

    assert delivered(sizes) == delivered([]) == delivered([1] * 40)


@given(words=st.lists(st.integers(0, 3), max_size=8), sizes=st.lists(st.integers(1, 3), max_size=8))
def test_nor_do_ids_without_text(words: list[int], sizes: list[int]) -> None:
    pieces = Words("a", "", "ab", "b")

    def delivered(rounds: list[int]) -> list[int]:
        return [i for ids, _ in run(OutputText(pieces, ["ba"]), words, rounds) for i in ids]

    assert delivered(sizes) == delivered([1] * 10)


def test_many_ids_without_text_are_not_decoded_again_for_ever() -> None:
    class Counting(Words):
        longest = 0

        def decode(self, ids: Sequence[int]) -> str:
            self.longest = max(self.longest, len(ids))
            return super().decode(ids)

    silent = Counting("")
    run(OutputText(silent), [0] * 500, [1] * 500)
    assert silent.longest < 100


def test_min_tokens_lets_a_stop_string_pass_that_its_tokens_complete() -> None:
    for least, expected in ((0, "a"), (2, "a"), (3, "abca"), (5, "abca"), (6, "abcabca")):
        output = OutputText(Letters(), ("bc",), (), min_tokens=least)
        for token in (0, 1, 2, 0, 1, 2, 0):
            if output.push(token):
                break
        assert (output.take(final=True)[1], output.stopped) == (expected, least < 6)
