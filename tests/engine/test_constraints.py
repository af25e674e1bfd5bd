"""Constraints against a plain reading of their definitions, and a path against the same tokens committed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.decoding import Cycle

from gammaray.engine.constraints import Constraints, constraints
from gammaray.engine.logprobs import report
from gammaray.types import SamplingParams

VOCAB = 8
EOS = 7
TOKENS = st.integers(0, VOCAB - 1)
SAMPLING = st.builds(
    SamplingParams,
    min_tokens=st.sampled_from([0, 3]),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.5, 2.0, 100.0])).map(
        lambda bias: tuple(bias.items())
    ),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.4]),
)


def table(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def by_definition(
    logits: list[float], sampling: SamplingParams, prompt: list[int], output: list[int]
) -> list:
    """One token at a time, in the documented order."""
    row = list(logits)
    for *before, last in sampling.bad_words:
        if not before or output[-len(before) :] == before:
            row[last] = -math.inf
    for token, bias in sampling.logit_bias:
        row[token] += bias
    if len(output) < sampling.min_tokens and any(x > -math.inf for i, x in enumerate(row) if i != EOS):
        row[EOS] = -math.inf
    for token in range(VOCAB):
        if token in prompt + output:
            r = sampling.repetition_penalty
            row[token] = row[token] / r if row[token] > 0 else row[token] * r
        row[token] -= sampling.frequency_penalty * output.count(token)
        row[token] -= sampling.presence_penalty * (token in output)
    return row


@given(
    seed=st.integers(0, 1000),
    sampling=SAMPLING,
    prompt=st.lists(TOKENS, min_size=1, max_size=5),
    output=st.lists(TOKENS, max_size=6),
    cut=st.integers(0, 6),
)
def test_a_path_counts_like_committed_tokens(seed, sampling, prompt, output, cut):
    rules = Constraints(sampling, prompt, [EOS], VOCAB)
    for token in output[:cut]:
        rules.advance(token)
    row = table(seed)
    rules.apply(row, output[cut:])
    expected = by_definition(table(seed).tolist(), sampling, prompt, output)
    assert row.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    again = table(seed)
    rules.apply(again, output[cut:])
    assert torch.equal(row, again), "looking ahead changed something"


def applied(sampling: SamplingParams, output: list[int], path: list[int] = (), matcher=None) -> list[float]:
    rules = Constraints(sampling, [0], [EOS], VOCAB, matcher)
    for token in output:
        rules.advance(token)
    row = torch.zeros(VOCAB)
    rules.apply(row, path)
    return row.tolist()


def test_a_bad_word_may_begin_in_the_output_and_end_on_the_path():
    sampling = SamplingParams(bad_words=((1, 2, 3),))
    assert applied(sampling, [1], [2])[3] == -math.inf
    assert applied(sampling, [2, 1], [1, 2])[3] == -math.inf
    assert applied(sampling, [1], [2, 2])[3] == 0
    assert applied(sampling, [2], [])[3] == 0


def test_min_tokens_counts_the_path():
    sampling = SamplingParams(min_tokens=3)
    assert applied(sampling, [1], [1])[EOS] == -math.inf
    assert applied(sampling, [1], [1, 1])[EOS] == 0


def test_the_grammar_masks_each_node_by_its_own_path_and_stays_where_it_was():
    matcher = Cycle([1, 2, 3], VOCAB, EOS)
    rules = Constraints(SamplingParams(), [0], [EOS], VOCAB, matcher)
    rules.advance(1)
    for path, allowed in (([], [2]), ([2], [3]), ([2, 3], [1, EOS]), ([2, 3, 1], [2]), ([], [2])):
        row = torch.zeros(VOCAB)
        rules.apply(row, path)
        assert [i for i, x in enumerate(row.tolist()) if x == 0] == allowed
    assert matcher.state == 1


def test_behind_the_end_of_the_grammar_nothing_is_masked():
    """Those logits are of a token that is cut off; a row without any token would look like a failure."""
    matcher = Cycle([1], VOCAB, EOS)
    assert applied(SamplingParams(), [1], [EOS], matcher) == [0.0] * VOCAB
    assert not matcher.finished


def test_a_text_that_its_grammar_has_completed_may_be_shorter_than_min_tokens():
    class Done(Cycle):
        def mask(self):
            return torch.arange(VOCAB) == EOS

    assert applied(SamplingParams(min_tokens=5), [1], [], Done([1], VOCAB, EOS))[EOS] == 0


def test_a_matcher_that_fails_on_the_way_is_rolled_back():
    class Broken(Cycle):
        def mask(self):
            raise RuntimeError("broken")

    matcher = Broken([1, 2, 3], VOCAB, EOS)
    rules = Constraints(SamplingParams(), [0], [EOS], VOCAB, matcher)
    with pytest.raises(RuntimeError):
        rules.apply(torch.zeros(VOCAB), [1, 2])
    assert matcher.state == 0


@pytest.mark.parametrize(
    "one",
    [
        {"min_tokens": 1},
        {"bad_words": ((1,),)},
        {"logit_bias": ((1, 1.0),)},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
    ],
)
def test_only_a_bound_request_pays(one):
    assert constraints(SamplingParams(**one), [0], [EOS], VOCAB, None) is not None
    assert constraints(SamplingParams(temperature=0.5, top_k=3), [0], [EOS], VOCAB, None) is None


def test_reported_ties_come_lowest_id_first():
    row = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    (entry,) = report(row, [4], 2)
    assert [token for token, _ in entry.top] == [1, 2]
    assert entry.logprob == pytest.approx(float(row.log_softmax(-1)[0, 4]))
