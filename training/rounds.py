"""What a drafter's rounds on a finished text would have been, without decoding it again.

The target passes over the text once and tells its hidden states; the drafter then drafts where a round would
have begun, and what it drafted is accepted as far as the text goes on so. On text that the target wrote by
coupled decoding (math.md section 1) these are the rounds that the engine would have had.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import inf

import torch
from torch import Tensor

from gammaray.engine.batch import Row
from gammaray.engine.drafters.base import Drafter, DraftTree, DraftView, Featured
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError
from gammaray.training.calibrate import Round
from gammaray.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)  # drafts are deterministic chains
AT_ONCE = 256  # tokens of a pass
RID = "replayed"


def replay(
    drafter: Drafter, runner: ModelRunner, tokens: Sequence[int], answers: Sequence[bool], depth: int
) -> Iterator[Round]:
    """Rounds with chains of at most `depth` in what the target wrote of `tokens` (`answers`).

    For drafters that read tokens or hidden states; one over the target's own pages would spoil them. Uses
    the first pages of `runner`. Raises ConfigError for a text that does not fit there.
    """
    told = _states(drafter, runner, tokens)
    drafter.catch_up(RID, tokens[:1])
    place = 1  # tokens that the drafter knows
    try:
        for start, end in _spans(answers):
            # An answer's first token comes from the prompt's own pass.
            place = _commit(drafter, tokens, told, place, max(start + 1, 2))
            while place < end:
                tree = _draft(drafter, place, min(depth, end - place))
                accepted = _matching(tree, tokens[place:end])
                yield Round(() if tree is None else tree.confidence or (), accepted)
                place = _commit(drafter, tokens, told, place, min(place + accepted + 1, end))
    finally:
        drafter.release(RID)


def _draft(drafter: Drafter, length: int, depth: int) -> DraftTree | None:
    view = DraftView(RID, length, depth, 1, GREEDY, 0)
    return drafter.collect(drafter.begin([view]), inf).get(RID)


def _commit(drafter: Drafter, tokens: Sequence[int], told: Tensor | None, place: int, end: int) -> int:
    if end > place:
        drafter.commit(RID, tokens[place:end], None if told is None else told[place - 1 : end - 1])
    return max(place, end)


def _matching(tree: DraftTree | None, text: Sequence[int]) -> int:
    drafted = () if tree is None else tree.tokens
    differs = (i for i, (ours, theirs) in enumerate(zip(drafted, text, strict=False)) if ours != theirs)
    return next(differs, min(len(drafted), len(text)))


def _spans(answers: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Start and end of each run of tokens that the target wrote."""
    start = 0
    for written, run in groupby(answers):
        end = start + len(list(run))
        if written:
            yield start, end
        start = end


def _states(drafter: Drafter, runner: ModelRunner, tokens: Sequence[int]) -> Tensor | None:
    """What the drafter reads of the target: [T, F]; None where it reads tokens only."""
    if not isinstance(drafter, Featured):
        return None
    blocks = range(-(-len(tokens) // runner.block_size))
    if len(blocks) > runner.num_blocks:
        raise ConfigError(
            f"a text of {len(tokens)} tokens does not fit into {runner.num_blocks} KV blocks of "
            f"{runner.block_size}: give more"
        )
    passes = (
        runner.forward_features([Row(tokens[start : start + AT_ONCE], start, blocks)], drafter.layers)[1]
        for start in range(0, len(tokens), AT_ONCE)
    )
    return torch.cat(list(passes))
