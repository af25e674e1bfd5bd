"""From logits to the distribution that is sampled, for target and drafter; a drafter's draws from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gammaray.engine.drafters.base import Drawn
from gammaray.kernels.philox import NoiseKeys, Purpose, gumbel_at
from gammaray.types import SamplingParams

_WINDOW = 1024  # top_p looks here first: selecting 1024 of 49152 costs an eighth of sorting them
SUPPORT = 64  # tokens of q that a draft carries (DraftTree.q_ids)


def process(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log-probabilities after temperature, min_p, top_k, top_p, in this order. [N, V] float32 to the same.

    Excluded tokens get -inf; at least one is kept. min_p keeps tokens of at least min_p times the largest
    probability. top_k and top_p keep a prefix of the stable descending order (equal logits: lowest id first);
    top_p the smallest one whose share of what min_p and top_k left reaches top_p. Greedy rows are log_softmax
    of the logits, unfiltered. A row's result does not depend on its batch mates, to the bit.
    """
    scaled = _scale(logits, params)
    filtered = [i for i, row in enumerate(params) if not row.greedy and _filters(row, logits.shape[1])]
    if filtered:
        scaled[filtered] = _filter(scaled[filtered], [params[i] for i in filtered])
    return scaled.log_softmax(-1)


def draw_children(
    logprobs: Tensor,
    params: Sequence[SamplingParams],
    sequences: Sequence[int],
    positions: Sequence[int],
    width: int,
    drawn: Drawn,
    coupled: bool,
    branches: Sequence[int] | None = None,
    names: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`width` children for each of N draft rows, and the q they were drawn from.

    logprobs [N, V]: the drafter's, processed with the request's own parameters. Of fewer tokens, `names` [V]
    are those of the columns. `positions` are absolute, of the tokens drawn here. q is the top 64 of each row,
    renormalised; drafts are drawn from exactly this q.

    "deterministic"        the top `width` of q; greedy rows always
    coupled                the top `width` of log q + the target's own noise at that position; to the
                           rejection rules these are draws without replacement
    "iid"                  `width` independent draws, duplicates kept
    "without_replacement"  Gumbel top-k (Kool et al., arXiv 1903.06059), in the order drawn

    `branches` numbers the rows of one call that share (seed, sequence, position), 0, 1, ...: nodes of one
    level under different parents then draw with noise of their own. Where q has fewer than `width` tokens,
    siblings without replacement end in tokens of probability 0, which the rejection rule passes over.

    Returns tokens [N, w], q_ids [N, S] and q_probs [N, S], descending; S = min(64, V) and w = min(width,
    S), or w = width when i.i.d.
    """
    scores, q_ids = logprobs.topk(min(SUPPORT, logprobs.shape[1]))  # [N, S]
    q_ids = q_ids if names is None else names[q_ids]  # noise belongs to tokens
    q_log = scores.log_softmax(-1)
    sampled = [drawn != "deterministic" and not row.greedy for row in params]
    noisy = torch.tensor(sampled, device=q_ids.device)  # [N]
    purpose = Purpose.TARGET if coupled else Purpose.DRAFT
    branches = [0] * len(params) if branches is None else branches

    def perturbed(sibling: int) -> Tensor:
        ranks = [0 if coupled else branch * width + sibling for branch in branches]
        seeds = [row.seed for row in params]
        keys = NoiseKeys.build(seeds, sequences, positions, purpose, ranks, q_ids.device)
        return torch.where(noisy[:, None], q_log + gumbel_at(keys, q_ids), q_log)  # [N, S]

    def independent(sibling: int) -> Tensor:
        top = min(sibling, q_ids.shape[1] - 1)  # of a greedy row: q is in descending order
        return torch.where(noisy, perturbed(sibling).argmax(-1), top)  # [N]

    if drawn == "iid" and not coupled:
        picks = torch.stack([independent(sibling) for sibling in range(width)], dim=1)
    else:
        picks = perturbed(0).topk(min(width, q_ids.shape[1])).indices
    return q_ids.gather(1, picks), q_ids, q_log.exp()


def _scale(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """(logits - max) / temperature: at most 0, so that no temperature can overflow. A new tensor."""
    temperature = _column([1.0 if row.greedy else row.temperature for row in params], logits)
    temperature = temperature.clamp_min(torch.finfo(logits.dtype).tiny)  # what rounds to 0 would give 0 / 0
    greedy = torch.tensor([[row.greedy] for row in params], device=logits.device)
    return torch.where(greedy, logits, (logits - logits.amax(-1, keepdim=True)) / temperature)


def _filters(params: SamplingParams, vocab: int) -> bool:
    return params.min_p > 0 or params.top_p < 1 or 0 < params.top_k < vocab


def _filter(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """min_p, top_k, top_p on rows whose maximum is 0; excluded tokens become -inf. [R, V]"""
    vocab = scaled.shape[1]
    floor = _column([math.log(row.min_p) if row.min_p > 0 else -math.inf for row in params], scaled)
    scaled = scaled.masked_fill(scaled < floor, -math.inf)
    by_k = [i for i, row in enumerate(params) if 0 < row.top_k < vocab]
    by_p = [i for i, row in enumerate(params) if not 0 < row.top_k < vocab and row.top_p < 1]
    if by_k:
        scaled[by_k] = _top_k(scaled[by_k], [params[i] for i in by_k])
    if by_p:
        scaled[by_p] = _top_p(scaled[by_p], [params[i].top_p for i in by_p])
    return scaled


def _top_k(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """top_k, then top_p within it: only the largest top_k values are ever ordered."""
    best = scaled.topk(max(row.top_k for row in params)).values  # [R, W] descending
    top_k = torch.tensor([[row.top_k] for row in params], device=scaled.device)
    weights = best.double().exp() * (torch.arange(best.shape[1], device=scaled.device) < top_k)
    share = _column([row.top_p if row.top_p < 1 else math.inf for row in params], weights)
    counts = _prefix(weights, share * weights.cumsum(-1)[:, -1:])
    return _keep_first(scaled, best, torch.minimum(counts, top_k))


def _top_p(scaled: Tensor, shares: Sequence[float], window: int = _WINDOW) -> Tensor:
    """top_p over the whole vocabulary, ordering a window of it where that is enough."""
    window = min(window, scaled.shape[1])
    best = scaled.topk(window).values if window < scaled.shape[1] else scaled.sort(descending=True).values
    # log_softmax of the maximum (0) is minus the log of the whole mass; unlike sum() it never splits a row.
    mass = scaled.log_softmax(-1).amax(-1, keepdim=True).double().neg().exp()  # [R, 1]
    counts = _prefix(best.double().exp(), _column(shares, mass) * mass)
    kept = _keep_first(scaled, best, counts)
    short = (counts[:, 0] == window).nonzero()[:, 0].tolist() if window < scaled.shape[1] else []
    if short:
        kept[short] = _top_p(scaled[short], [shares[i] for i in short], scaled.shape[1])
    return kept


def _prefix(weights: Tensor, mass: Tensor) -> Tensor:
    """How many of each row's first weights it takes to reach mass [R, 1], at least 1. [R, W] to [R, 1]"""
    before = torch.nn.functional.pad(weights.cumsum(-1)[:, :-1], (1, 0))
    return (before < mass).sum(-1, keepdim=True).clamp_min(1)


def _keep_first(scaled: Tensor, best: Tensor, counts: Tensor) -> Tensor:
    """Keep the first counts [R, 1] tokens of the stable descending order; best [R, W] begins its values."""
    last = best.gather(1, counts - 1)
    above, ties = scaled > last, scaled == last
    room = counts - above.sum(-1, keepdim=True)
    if bool((ties.sum(-1, keepdim=True) > room).any()):
        ties &= ties.cumsum(-1) <= room
    return scaled.masked_fill(~(above | ties), -math.inf)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
