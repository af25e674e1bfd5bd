"""Log-probabilities to report: of the target's raw logits, before anything is done to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gammaray.types import Logprobs


def report(logits: Tensor, tokens: Sequence[int], top: int) -> list[Logprobs]:
    """For each row of raw logits [R, V] the token that was chosen there, and the `top` best ones.

    Equal values come lowest id first.
    """
    if not tokens:
        return []
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = [_best(row, min(top, logits.shape[1])) for row in logprobs] if top else [()] * len(tokens)
    return [Logprobs(*pair) for pair in zip(chosen, best, strict=True)]


def _best(row: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    last = row.topk(count).values[-1]
    ids = (row >= last).nonzero()[:, 0]  # ascending, so a stable sort breaks ties by id
    values, order = row[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order][:count].tolist(), values[:count].tolist(), strict=True))
