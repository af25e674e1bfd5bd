"""Drafted trees as the kernels of `kernels/verification.py` take them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gammaray.kernels.bench.walks import Drafted, Limits
from gammaray.kernels.verification import Edit, Job, Node, Size, VerifyBatch


def pack(jobs: Sequence[Drafted], vocab: int, levels: bool) -> VerifyBatch:
    """Jobs one behind the other, on the CPU."""
    listed = [_listed(job, job.limits) for job in jobs]
    batch = VerifyBatch.empty(_size(jobs, listed, vocab, levels))
    batch.q_probs.zero_()
    row = edit = 0
    for at, (job, own) in enumerate(zip(jobs, listed, strict=True)):
        edits, nodes = slice(edit, edit + own.shape[1]), slice(row + 1, row + 1 + len(job.tokens))
        _pack_job(batch.jobs[:, at], job, row, edits)
        batch.edits[:, edits] = own
        batch.q_ids[nodes], batch.q_probs[nodes] = job.q_ids, job.q_probs
        row, edit = nodes.stop, edits.stop
    _pack_rows(batch, [(at, job, row) for at, job in enumerate(jobs) for row in range(len(job.tokens) + 1)])
    return batch


def _size(jobs: Sequence[Drafted], listed: Sequence[Tensor], vocab: int, levels: bool) -> Size:
    limits = [job.limits for job in jobs if job.limits]
    return Size(
        jobs=len(jobs),
        rows=sum(len(job.tokens) + 1 for job in jobs),
        vocab=vocab,
        depth=max(len(job.path(row)) for job in jobs for row in range(len(job.tokens) + 1)),
        support=max(job.q_ids.shape[1] for job in jobs),
        edits=sum(edits.shape[1] for edits in listed),
        bans=sum(len(row) for one in limits for row in one.bans),
        masks=sum(mask is not None for one in limits for mask in one.masks),
        filters=any(job.sampling.filters for job in jobs),
        constrains=bool(limits),
        levels=levels,
    )


def _pack_rows(batch: VerifyBatch, rows: Sequence[tuple[int, Drafted, int]]) -> None:
    """`rows`: job, and row of it, of each row of logits."""
    mask = ban = 0
    for column, (at, job, row) in zip(batch.nodes.unbind(1), rows, strict=True):
        bans = job.limits.bans[row] if job.limits else ()
        allowed = job.limits.masks[row] if job.limits else None
        column[Node.JOB], column[Node.DEPTH] = at, len(job.path(row))
        column[Node.TOKEN] = job.tokens[row - 1] if row else -1
        column[Node.PARENT] = job.parents[row - 1] + 1 if row else -1
        column[Node.MASK] = -1 if allowed is None else mask
        column[Node.BANS], column[Node.BANS_END] = ban, ban + len(bans)
        batch.bans[ban : ban + len(bans)] = torch.tensor(bans, dtype=torch.int32)
        ban += len(bans)
        if allowed is not None:
            batch.masks[mask] = _words(allowed, batch.size.words)
            mask += 1


def _pack_job(column: Tensor, job: Drafted, first: int, edits: slice) -> None:
    """A column [len(Job)] of `VerifyBatch.jobs`."""
    sampling, limits = job.sampling, job.limits
    column.zero_()
    column[Job.FIRST_ROW], column[Job.ROWS], column[Job.RULE] = first, len(job.tokens) + 1, int(job.rule)
    column[Job.SEED_LOW], column[Job.SEED_HIGH] = _signed(job.seed), _signed(job.seed >> 32)
    column[Job.SEQUENCE], column[Job.POSITION] = job.sequence, job.position
    column[Job.FILTERED], column[Job.TOP_K] = int(sampling.filters), sampling.top_k
    column[Job.LOGPROBS], column[Job.CONSTRAINED] = 1, int(limits is not None)
    column[Job.EDITS], column[Job.EDITS_END] = edits.start, edits.stop
    reals = {Job.TEMPERATURE: sampling.temperature, Job.TOP_P: sampling.top_p, Job.FLOOR: math.inf}
    if sampling.min_p > 0:
        reals[Job.FLOOR] = -math.log(sampling.min_p)
    if limits:
        reals |= {Job.REPETITION: limits.repetition, Job.REWARD: 1 / limits.repetition}
        reals |= {Job.FREQUENCY: limits.frequency, Job.PRESENCE: limits.presence}
    for field, real in reals.items():
        column[field] = int(torch.tensor(real).view(torch.int32))


def _listed(job: Drafted, limits: Limits | None) -> Tensor:
    """Columns [len(Edit), E] of the tokens that penalties or bias touch somewhere in the tree."""
    if limits is None:
        return torch.empty(len(Edit), 0, dtype=torch.int32)
    seen = limits.prompt | (limits.counts > 0)
    touched = seen | (limits.bias != 0)
    touched[list(job.tokens)] = True
    tokens = touched.nonzero()[:, 0]
    edits = torch.empty(len(Edit), len(tokens), dtype=torch.int32)
    edits[Edit.TOKEN], edits[Edit.SEEN] = tokens, seen[tokens]
    edits[Edit.BIAS] = limits.bias[tokens].view(torch.int32)
    edits[Edit.COUNT] = limits.counts[tokens].view(torch.int32)
    return edits


def _signed(word: int) -> int:
    """The low 32 bits, as an int32."""
    word &= (1 << 32) - 1
    return word - (word >> 31 << 32)


def _words(allowed: Tensor, words: int) -> Tensor:
    """Bit v % 32 of word v // 32 from bool [V]: int32 [words]."""
    bits = torch.zeros(words * 32, dtype=torch.int64)
    bits[: len(allowed)] = allowed
    packed = (bits.view(words, 32) << torch.arange(32)).sum(1)
    return (packed - (packed >> 31 << 32)).int()
