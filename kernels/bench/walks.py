"""What a drafted tree emits, one step after the other in plain torch: the truth of fused verification.

Rules and noise are those of `verify.py` and `philox.py`. Constraints are dense here and filters sort the row,
so that nothing is shared with the kernels' lists of tokens and their search for the cut.

Rounding may choose between equals, so a step counts as *decided* only where it is not near a tie: where the
two best scores, the tests of children and the cut of the filters are all clear of it, by TIE or CUT. Greedy
steps compare numbers and compute none: they are always decided, and equal logits give the lowest id.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gammaray.kernels import verify as rules
from gammaray.kernels.philox import NoiseKeys, Purpose, gumbel, uniform
from gammaray.kernels.verification import Rule

TIE = 1e-3  # between the two best of log p + G, which float32 rounds to some 1e-5; of u q / p, relative
CUT = 3e-6  # between top_p and a mass, min_p and a distance; float32 sums of a row are good to some 1e-7


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Constraints of a job; bans and masks are given for each of its N rows."""

    repetition: float
    frequency: float
    presence: float
    bias: Tensor  # [V] float32
    prompt: Tensor  # [V] bool, tokens in it
    counts: Tensor  # [V] float32, in the output
    bans: tuple[tuple[int, ...], ...]  # ~token: only while another token is left
    masks: tuple[Tensor | None, ...]  # [V] bool, what may follow


@dataclass(frozen=True, slots=True)
class Drafted:
    """One job: T nodes, N = T + 1 rows of logits, the root's first."""

    rule: Rule
    parents: tuple[int, ...]  # [T], -1: the root
    tokens: tuple[int, ...]  # [T]
    q_ids: Tensor  # [T, S] int64
    q_probs: Tensor  # [T, S] float32
    seed: int
    sequence: int
    position: int
    sampling: Sampling
    limits: Limits | None = None

    def children(self, row: int) -> list[int]:
        return [node for node in range(len(self.tokens)) if self.parents[node] == row - 1]

    def path(self, row: int) -> list[int]:
        """Tokens from the root to a row, its own included."""
        return [*self.path(self.parents[row - 1] + 1), self.tokens[row - 1]] if row else []

    def noise(self, purpose: Purpose, row: int, device: torch.device) -> NoiseKeys:
        position = self.position + len(self.path(row))
        return NoiseKeys.build([self.seed], [self.sequence], [position], purpose, device=device)


@dataclass(frozen=True, slots=True)
class Step:
    node: int  # accepted; -1: none
    token: int
    decided: bool


@dataclass(frozen=True, slots=True)
class Walked:
    path: list[int]  # accepted nodes
    tokens: list[int]  # theirs, then the recovered or bonus token
    whole: bool  # False: ends before the first step that is not decided


def walk(job: Drafted, logits: Tensor) -> Walked:
    """logits [N, V]"""
    path: list[int] = []
    tokens: list[int] = []
    while True:
        found = step(job, logits, path[-1] + 1 if path else 0)
        if not found.decided:
            return Walked(path, tokens, False)
        tokens.append(found.token)
        if found.node < 0:
            return Walked(path, tokens, True)
        path.append(found.node)


def step(job: Drafted, logits: Tensor, row: int) -> Step:
    """From one row of logits [N, V]: the child that is accepted, or the token that is emitted instead."""
    x = constrained(job, logits[row].float(), row)
    children = job.children(row)
    if job.rule is Rule.GREEDY:
        return _match(job, children, int(x.argmax()), True)
    logprobs, clear = filtered(x, job.sampling)
    if job.rule is Rule.COUPLED:
        token, sure = _draw(logprobs, job.noise(Purpose.TARGET, row, x.device))
        return _match(job, children, token, clear and sure)
    return _reject(job, children, logprobs, row, clear)


def constrained(job: Drafted, x: Tensor, row: int) -> Tensor:
    """Mask, bans, bias, penalties: logits [V] of a row as they are sampled from."""
    limits = job.limits
    if limits is None:
        return x
    mask, bans = limits.masks[row], limits.bans[row]
    x = x.clone() if mask is None else x.masked_fill(~mask, -math.inf)
    x[[token for token in bans if token >= 0]] = -math.inf
    rest = x.clone()
    rest[[~token for token in bans if token < 0]] = -math.inf
    x = (rest if bool((rest > -math.inf).any()) else x) + limits.bias
    own = torch.tensor(job.path(row), dtype=torch.int64, device=x.device)
    counts = limits.counts + own.bincount(minlength=len(x))
    factor = torch.where(x > 0, 1 / limits.repetition, limits.repetition)
    x = torch.where(limits.prompt | (counts > 0), x * factor, x)
    return x - (counts * limits.frequency + (counts > 0) * limits.presence)


def filtered(x: Tensor, sampling: Sampling) -> tuple[Tensor, bool]:
    """Log-probabilities [V] after temperature, min_p, top_k, top_p, and whether the cut is decided."""
    scaled = (x - x.max()) / x.new_tensor([sampling.temperature])
    top, ids = scaled.sort(descending=True, stable=True)
    kept, clear = torch.ones_like(ids, dtype=torch.bool), True
    if sampling.min_p > 0:
        floor = math.log(sampling.min_p)
        kept, clear = top >= floor, bool(((top - floor).abs() > CUT).all())
    if sampling.top_k > 0:
        kept &= torch.arange(len(ids), device=x.device) < sampling.top_k
    if sampling.top_p < 1:
        share = top.double().masked_fill(~kept, -math.inf).softmax(-1)
        before = share.cumsum(-1) - share
        clear &= bool(((before - sampling.top_p).abs() > CUT)[kept].all())
        kept &= before < sampling.top_p
    return scaled.index_fill(0, ids[~kept], -math.inf).log_softmax(-1), clear


def apart(scores: Tensor) -> Tensor:
    """Whether the best score of each row [*, V] is clear of the second: [*] bool."""
    best = scores.topk(2).values
    return best[..., 0] - best[..., 1] > TIE


def _draw(logprobs: Tensor, keys: NoiseKeys) -> tuple[int, bool]:
    scores = logprobs + gumbel(keys, len(logprobs))[0]
    return int(scores.argmax()), bool(apart(scores))


def _match(job: Drafted, children: list[int], token: int, decided: bool) -> Step:
    return Step(next((node for node in children if job.tokens[node] == token), -1), token, decided)


def _reject(job: Drafted, children: list[int], logprobs: Tensor, row: int, clear: bool) -> Step:
    device, eldest = logprobs.device, children[:1]
    drafts = rules.SampledChildren(
        tokens=torch.tensor([[job.tokens[node] for node in children] or [-1]], device=device),
        q_ids=job.q_ids[eldest].flatten()[None],
        q_probs=job.q_probs[eldest].flatten()[None],
        without_replacement=torch.tensor([job.rule is Rule.WITHOUT_REPLACEMENT], device=device),
    )
    u = uniform(job.noise(Purpose.ACCEPT, row, device), drafts.tokens.shape[1])
    (rank, left), sure = tried(logprobs[None], drafts, u)
    at, clear = int(rank), clear and bool(sure)
    if at >= 0:
        return Step(children[at], job.tokens[children[at]], clear)
    token, apart_ = _draw(left[0].log(), job.noise(Purpose.RESIDUAL, row, device))
    return Step(-1, token, clear and apart_)


def tried(logprobs: Tensor, drafts: rules.SampledChildren, u: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """`rules.try_children`, and whether uniforms that are TIE away accept the same: [J] bool."""
    near = [rules.try_children(logprobs, drafts, u * (1 + change))[0] for change in (-TIE, TIE)]
    return rules.try_children(logprobs, drafts, u), near[0] == near[1]
