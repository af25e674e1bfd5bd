"""Small random trees under all rules, filters and constraints: fused verification against `walks.py`.

Everything is drawn on the CPU, so one seed makes the same jobs for every device.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gammaray.kernels.bench.case import SEED
from gammaray.kernels.bench.packing import pack
from gammaray.kernels.bench.walks import TIE, Drafted, Limits, Sampling, step, walk
from gammaray.kernels.verification import Rule, VerifyResult, VerifyWorkspace, verify

SUPPORT, NODES = 8, 6  # tokens of q; nodes of a tree
SPREAD, NOISE, OWN = 3.0, 0.5, 0.7  # of logits, of drafters about them; share of drafts that are the target's
FILTERS = (  # tight, on flat rows: what one leaves out is often drawn without it
    Sampling(1.5, top_k=3),
    Sampling(1.5, top_p=0.5),
    Sampling(1.5, min_p=0.3),
    Sampling(1.5, top_k=8, top_p=0.6),
)


@dataclass(frozen=True, slots=True)
class Kind:
    filters: bool
    limits: bool
    vocab: int
    levels: bool  # schedule
    dtype: torch.dtype = torch.float32

    @property
    def text(self) -> str:
        parts = ("trees", "filters" * self.filters, "constraints" * self.limits, f"{self.vocab} tokens")
        schedule = "by levels" if self.levels else "at once"
        return ", ".join(filter(None, (*parts, str(self.dtype).removeprefix("torch."), schedule)))


def kinds(device: torch.device) -> Iterator[Kind]:
    """All on CUDA; on a CPU, which interprets, few: a small vocabulary, and one of two chunks."""
    if device.type == "cpu":
        yield from (Kind(True, True, 40, False), Kind(False, False, 40, True), Kind(True, True, 4200, True))
        return
    for vocab, dtype in ((40, torch.float32), (5000, torch.float16), (128_256, torch.bfloat16)):
        for filters, limits in ((False, False), (True, False), (False, True), (True, True)):
            yield from (Kind(filters, limits, vocab, levels, dtype) for levels in (False, True))


def share_wrong(kind: Kind, device: torch.device) -> float:
    """Share of the jobs that emit something else than `walks.walk` says."""
    jobs, logits = zip(*(draft(kind, *one, device) for one in _each(kind)), strict=True)
    batch = pack(jobs, kind.vocab, kind.levels).to(device)
    result = verify(torch.cat(logits), batch, VerifyWorkspace.of(batch.size, device))
    found = VerifyResult.of(result.storage.cpu(), batch.size.depth)
    wrong = [_wrong(job, rows, found, at) for at, (job, rows) in enumerate(zip(jobs, logits, strict=True))]
    return sum(wrong) / len(wrong)


def _each(kind: Kind) -> Iterator[tuple[Rule, Sampling, random.Random]]:
    rng = random.Random(SEED)
    for at, rule in enumerate(Rule):
        if rule is Rule.GREEDY or not kind.filters:
            plain = Sampling(1.0 if rule is Rule.GREEDY else 0.8)
            yield from ((rule, plain, rng) for _ in range(1 if kind.filters else 4))
        else:
            few = FILTERS if kind.vocab > 1e5 else (FILTERS[at], FILTERS[at - 1])
            yield from ((rule, sampling, rng) for sampling in few)


def _wrong(job: Drafted, logits: Tensor, found: VerifyResult, at: int) -> bool:
    """As far as the truth is decided."""
    truth = walk(job, logits)
    path, count = truth.path, len(truth.tokens)
    same = found.path[at, : len(path)].tolist() == path and found.tokens[at, :count].tolist() == truth.tokens
    if truth.whole:
        same &= (int(found.accepted[at]), int(found.failed[at])) == (len(path), 0)
    rows = torch.tensor([0, *(node + 1 for node in path)][:count], dtype=torch.int64)
    tokens = torch.tensor(truth.tokens, dtype=torch.int64)
    raw = logits.float().log_softmax(-1).cpu()[rows, tokens]  # [count]
    return not (same and bool(((found.logprobs[at, :count] - raw).abs() < TIE).all()))


def draft(
    kind: Kind, rule: Rule, sampling: Sampling, rng: random.Random, device: torch.device
) -> tuple[Drafted, Tensor]:
    """A job, and its logits [N, V]. Siblings come from one q about their parent's row."""
    parents = tuple(-1 if node < 2 else rng.randrange(-1, node) for node in range(NODES))
    logits = (torch.randn(NODES + 1, kind.vocab) * SPREAD).to(device, kind.dtype)
    guess = logits.float() + (torch.randn(NODES + 1, kind.vocab) * NOISE).to(device)
    scores, ids = guess.topk(SUPPORT)  # [N, S]
    of = torch.tensor(parents, device=device) + 1  # the row that a node is drawn from
    job = Drafted(
        rule=rule,
        parents=parents,
        tokens=(),
        q_ids=ids[of],
        q_probs=scores.softmax(-1)[of],
        seed=rng.getrandbits(64),
        sequence=rng.randrange(4),
        position=rng.randrange(10**6),
        sampling=sampling,
        limits=_limits(kind.vocab, rng, device) if kind.limits else None,
    )
    for node in range(NODES):
        job = replace(job, tokens=(*job.tokens, _token(job, logits, node, rng)))
    return job, logits


def _token(job: Drafted, logits: Tensor, node: int, rng: random.Random) -> int:
    row = job.parents[node] + 1
    if job.rule in (Rule.GREEDY, Rule.COUPLED) and rng.random() < OWN:
        return step(job, logits, row).token
    used = [job.tokens[other] for other in job.children(row)]
    pairs = list(zip(job.q_ids[node].tolist(), job.q_probs[node].tolist(), strict=True))
    free = [pair for pair in pairs if job.rule is not Rule.WITHOUT_REPLACEMENT or pair[0] not in used]
    ids, probs = zip(*free, strict=True)
    return int(rng.choices(ids, probs)[0])


def _limits(vocab: int, rng: random.Random, device: torch.device) -> Limits:
    """Sometimes the mask of the root leaves two tokens, of which one is banned and one held back."""
    allowed = torch.rand(NODES + 1, vocab) < 0.8
    masks = [row if rng.random() < 0.5 else None for row in allowed]
    banned = [rng.sample(range(vocab // 2), 3) for _ in masks]
    bans = [(*row, ~rng.randrange(vocab // 2, vocab)) for row in banned]
    if rng.random() < 0.3:
        masks[0], bans[0] = torch.arange(vocab) < 2, (0, ~1)
    listed = torch.rand(vocab) < min(0.6, 300 / vocab)
    return Limits(
        repetition=rng.choice((0.6, 1.7)),
        frequency=rng.choice((-1.0, 1.2)),
        presence=rng.choice((-1.0, 1.5)),
        bias=(torch.randn(vocab) * 4 * (torch.rand(vocab) < 0.5) * listed).to(device),
        prompt=((torch.rand(vocab) < 0.5) & listed).to(device),
        counts=(torch.randint(4, (vocab,)) * listed).float().to(device),
        bans=tuple(bans),
        masks=tuple(None if mask is None else mask.to(device) for mask in masks),
    )
