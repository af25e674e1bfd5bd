from __future__ import annotations

import math
from itertools import pairwise
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.routing.features import (
    BUCKETS,
    DIMS,
    FEW,
    NAMES,
    PRIOR,
    WIDTH,
    WINDOW,
    bucket,
    features,
    repetition,
)

PINNED = [170.0, 7.0, 223.0, 104.0, 182.0, 217.0, 5.0]
TOKENS = st.lists(st.integers(0, 3) | st.integers(0, 200_000), max_size=WINDOW)


def named(prompt: list[int] | tuple[int, ...], table: np.ndarray | None = None) -> dict[str, float]:
    found = features(prompt, 0.7, "chat", "default", "lookup", 0.5, table)
    return dict(zip(NAMES, found, strict=True))


def longest_repeat(tokens: list[int]) -> int:
    """By the definition."""
    count = len(tokens)
    runs = (
        size
        for size in range(count)
        if len({tuple(tokens[i : i + size]) for i in range(count - size + 1)}) < count - size + 1
    )
    return max(runs, default=0)


@given(TOKENS.filter(lambda tokens: len(tokens) > 1))
def test_repetition_is_what_it_says(tokens: list[int]) -> None:
    distinct, bigrams, repeat = repetition(tokens)
    pairs = list(pairwise(tokens))
    again = sum(pair in pairs[:i] for i, pair in enumerate(pairs))
    assert distinct == pytest.approx(len(set(tokens)) / len(tokens))
    assert bigrams == pytest.approx(again / len(pairs))
    assert repeat == pytest.approx(longest_repeat(tokens) / (len(tokens) - 1))


def test_repetition_of_known_texts() -> None:
    assert repetition([7] * WINDOW) == (1 / WINDOW, 1 - 1 / (WINDOW - 1), 1.0)
    assert repetition(range(WINDOW)) == (1.0, 0.0, 0.0)
    assert repetition([1, 2, 3, 9, 1, 2, 3]) == pytest.approx((4 / 7, 2 / 6, 3 / 6))


@given(TOKENS, st.none() | st.floats(0, 1))
def test_every_prompt_has_all_features(tokens: list[int], prior: float | None) -> None:
    found = features(tokens, 1.0, "completions", "long", None, prior)
    assert len(found) == WIDTH
    assert not any(map(math.isinf, found))
    assert math.isnan(found[PRIOR]) == (prior is None)


def test_what_a_short_prompt_lacks_is_nan() -> None:
    empty, one = named([]), named([5])
    parts = [name for name in NAMES if name.startswith(("head", "tail"))]
    assert empty["log_length"] == 0 and all(math.isnan(empty[name]) for name in parts)
    assert one["head_distinct"] == 1 and math.isnan(one["head_bigrams"]) and math.isnan(one["tail_repeat"])


class OnlySlices(tuple[int, ...]):
    """Refuses whatever would read the whole of it."""

    def __getitem__(self, key: slice) -> tuple[int, ...]:  # type: ignore[override]
        found = super().__getitem__(key)
        assert len(found) <= WINDOW
        return found

    def __iter__(self) -> NoReturn:
        raise AssertionError("the whole prompt was read")


def test_only_head_and_tail_of_a_long_prompt_are_read() -> None:
    head, tail = list(range(WINDOW)), [3] * WINDOW
    found = named(OnlySlices([*head, *range(32_000), *tail]))
    assert found == pytest.approx(named([*head, *[8] * 32_000, *tail]), nan_ok=True)
    assert (found["head_repeat"], found["tail_repeat"]) == (0.0, 1.0)
    assert found["log_length"] == pytest.approx(math.log(32_129))


def test_names_have_the_same_buckets_in_every_release() -> None:
    names = ("chat", "completions", "default", "long", "ngram", "model", "lookup")
    assert [bucket(name) for name in names] == PINNED
    assert len(set(PINNED)) == len(names) and all(0 <= one < BUCKETS for one in PINNED)
    assert math.isnan(bucket(None))


def test_embeddings_are_the_mean_over_head_and_tail() -> None:
    table = np.random.default_rng(0).normal(size=(500, DIMS)).astype(np.float16)
    prompt = list(range(200))
    found = features(prompt, 0.0, "chat", "default", None, None, table)[-DIMS:]
    read = [*prompt[:WINDOW], *prompt[-WINDOW:]]
    np.testing.assert_allclose(found, table[read].astype(np.float64).mean(0), atol=1e-5)


def test_embeddings_that_are_not_to_be_had_are_nan() -> None:
    table = np.ones((10, DIMS), np.float16)
    assert all(map(math.isnan, features([1] * FEW, 0.0, "chat", "default", None, None)[-DIMS:]))
    few, enough = [1] * (FEW - 1), [3] * (FEW - 1) + [99]  # the last is beyond the table
    assert all(map(math.isnan, features(few, 0.0, "chat", "default", None, None, table)[-DIMS:]))
    assert features(enough, 0.0, "chat", "default", None, None, table)[-DIMS:] == (1.0,) * DIMS
