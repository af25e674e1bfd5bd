"""What is sifted out of the target's texts."""

from __future__ import annotations

import random

import pytest

from gammaray.training.sifting import FEWEST, Seen, before_loop


def text(seed: int, length: int = 200, words: int = 1000) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(words) for _ in range(length)]


@pytest.mark.parametrize("period", [1, 3, 12, 64])
@pytest.mark.parametrize("before", [0, 50])
def test_a_loop_is_cut_behind_its_first_turn(period: int, before: int) -> None:
    """A loop at the very beginning, and one of the longest period, are the edges of the search."""
    begin, turn = text(1, before), text(2, period)
    found = before_loop([*begin, *turn * (300 // period)])
    assert before + period <= found <= before + period + 1
    assert before_loop([*begin, *turn * (300 // period), *text(3)]) == found  # it goes on otherwise later


def test_what_repeats_a_little_is_no_loop() -> None:
    """Tables and lists repeat themselves for a few tokens, and songs a line."""
    line = text(4, 30)
    for own in (text(5), [*text(6), *[7, 8] * 12, *text(9)], [*line, *line, *text(10)], [], [1]):
        assert before_loop(own) == len(own)


def test_copies_are_seen_and_new_texts_are_not() -> None:
    seen, first = Seen(), text(11)
    assert seen.add(first)
    assert not seen.add(first)
    assert not seen.add([*text(12, 20), *first[:-20]])  # nearly the same, and not in the same place
    assert seen.add([*first[:60], *text(13, 140)])  # the same beginning is no copy
    assert all(seen.add(text(seed)) for seed in range(20, 60))


def test_short_texts_are_told_apart() -> None:
    """Of a short text perhaps no shingle is in the sample: nothing must then count as seen, or never."""
    texts = [text(seed, FEWEST) for seed in range(50)]
    seen = Seen()
    assert all(seen.add(own) for own in texts)
    assert not any(seen.add(own) for own in texts)
