"""Lossless verification on the device: from the logits of a step to what its jobs emit, without the host.

The caller packs what it knows into one `VerifyBatch`, launches `verify` and reads one tensor back. The
rules, the noise and the order of processing are those of `verify.py`, `philox.py` and the engine's
`logits.py`, which are the truth; the Triton kernels are in `fused/`, a file each. They run in this order:

logits       penalties, bias and bans of the rows that have any: an edited float32 copy of each
thresholds   where min_p, top_k and top_p cut the rows that have any
score        one read of the logits: each chunk's maximum, mass and best noisy score
walk         one program a job: puts the chunks together and follows the tree
emit         rejection only: the recovered or bonus token of each job, from one more row

Two schedules give the same result. *At once* scores every row and then walks; *by levels* scores only the
rows that the walks stand on, level after level, which reads less once there are many rows. Scored rows are
numbered by *slot*: a slot is a row at once, and a job by levels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from gammaray.types import MAX_TREE_NODES

CHUNK = 4096  # tokens that one program scores
ROOM = 4 * CHUNK  # candidates for the cut of a row's filters; more take longer
LAUNCHES = 20  # rows whose scoring takes as long as the launches of one level (an estimate, not measured)


class Rule(IntEnum):
    """How a job is verified; see `verify.py`. I.i.d. siblings include the chain."""

    GREEDY = 0
    COUPLED = 1
    IID = 2
    WITHOUT_REPLACEMENT = 3


class Job(IntEnum):
    """Rows of `VerifyBatch.jobs`; those marked f hold the bits of a float32."""

    FIRST_ROW = 0  # -1: no job, padding
    ROWS = 1  # the root and the nodes
    RULE = 2
    SEED_LOW = 3
    SEED_HIGH = 4
    SEQUENCE = 5
    POSITION = 6  # of the token behind the root
    TEMPERATURE = 7  # f, 1 when greedy
    FILTERED = 8  # whether one of the next three cuts anything
    TOP_K = 9  # 0: off
    TOP_P = 10  # f
    FLOOR = 11  # f, -log(min_p); inf: off
    LOGPROBS = 12  # whether those of the emitted tokens are wanted
    CONSTRAINED = 13  # whether one of the following, a mask or a ban changes any row
    REPETITION = 14  # f
    REWARD = 15  # f, 1 / repetition
    FREQUENCY = 16  # f
    PRESENCE = 17  # f
    EDITS = 18  # first of the job's columns of `edits`
    EDITS_END = 19


class Node(IntEnum):
    """Rows of `VerifyBatch.nodes`, which has a column for each row of logits."""

    JOB = 0  # -1: padding
    TOKEN = 1  # -1: the root
    PARENT = 2  # row of the parent, counted from the job's first; -1: the root
    DEPTH = 3
    MASK = 4  # row of `masks`; -1: none
    BANS = 5  # first of the row's `bans`
    BANS_END = 6


class Edit(IntEnum):
    """Rows of `VerifyBatch.edits`, a column for each token that a job's penalties or bias touch."""

    TOKEN = 0
    BIAS = 1  # f
    COUNT = 2  # f, in the output
    SEEN = 3  # whether in the prompt or the output


@dataclass(frozen=True, slots=True)
class Size:
    """Shapes of a batch. Batches of one size can share a captured graph and a workspace."""

    jobs: int  # J
    rows: int  # N, roots and nodes
    vocab: int  # V
    depth: int = 0  # D, levels of the deepest tree
    support: int = 0  # S, tokens of q; 0: no job is verified by rejection
    edits: int = 0  # E
    bans: int = 0  # B
    masks: int = 0  # M
    filters: bool = False
    constrains: bool = False
    levels: bool = False  # score by levels

    @property
    def slots(self) -> int:
        return self.jobs if self.levels else self.rows

    @property
    def words(self) -> int:
        """32-bit words of a mask."""
        return (self.vocab + 31) // 32

    @property
    def width(self) -> int:
        """Words of one job's result."""
        return 4 * self.depth + 5


def by_levels(jobs: int, rows: int, depth: int) -> bool:
    """Whether to score by levels: where that saves more rows than its launches cost."""
    return rows - 3 * jobs > LAUNCHES * (depth + 1)


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """All that verification needs besides logits. Views of `storage`, so that one copy moves the batch.

    A job's rows lie together: its root, then its nodes in tree order. q of a sampled node is in its own row;
    siblings are tested with the q of the first. Tokens with q > 0 are distinct.
    """

    size: Size
    storage: Tensor  # [bytes / 4] int32
    jobs: Tensor  # [len(Job), J] int32
    nodes: Tensor  # [len(Node), N] int32
    q_ids: Tensor  # [N, S] int32
    q_probs: Tensor  # [N, S] float32; 0 pads
    edits: Tensor  # [len(Edit), E] int32
    bans: Tensor  # [B] int32 tokens, distinct in a row; ~token: only while another token is left (min_tokens)
    masks: Tensor  # [M, words] int32, bit v % 32 of word v // 32 is set where token v may follow

    @classmethod
    def empty(cls, size: Size, device: torch.device | str = "cpu", pin: bool = False) -> VerifyBatch:
        """Padding only."""
        shapes = _shapes(size)
        ends = [0]
        for rows, columns in shapes:
            ends.append(ends[-1] + -(-rows * columns // 4) * 4)  # each part begins at a multiple of 16 bytes
        storage = torch.full((max(ends[-1], 4),), -1, dtype=torch.int32, device=device, pin_memory=pin)
        parts = [
            storage[end : end + rows * columns].view(rows, columns)
            for end, (rows, columns) in zip(ends, shapes, strict=False)
        ]
        jobs, nodes, q_ids, q_probs, edits, bans, masks = parts
        return cls(size, storage, jobs, nodes, q_ids, q_probs.view(torch.float32), edits, bans[0], masks)

    def to(self, device: torch.device | str) -> VerifyBatch:
        """One copy, which does not wait when this batch is pinned."""
        batch = VerifyBatch.empty(self.size, device)
        batch.storage.copy_(self.storage, non_blocking=True)
        return batch


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What the jobs emit. Views of `storage` [J, width] int32, which one copy brings to the host."""

    storage: Tensor
    path: Tensor  # [J, D] accepted nodes, root to leaf; -1 behind them
    ranks: Tensor  # [J, D] of these among their siblings
    tokens: Tensor  # [J, D + 1] their tokens, then the recovered or bonus token; -1 behind
    logprobs: Tensor  # [J, D + 1] float32, of these under the raw logits; where they are wanted
    accepted: Tensor  # [J] length of the path; `accepted + 1 - failed` tokens are emitted
    tested: Tensor  # [J] visited nodes that had children
    failed: Tensor  # [J] 1: the row behind the path had a NaN or no finite maximum

    @classmethod
    def of(cls, storage: Tensor, depth: int) -> VerifyResult:
        path, ranks, tokens, logprobs, counts = storage.split([depth, depth, depth + 1, depth + 1, 3], 1)
        return cls(storage, path, ranks, tokens, logprobs.view(torch.float32), *counts.unbind(1))


@dataclass(frozen=True, slots=True)
class VerifyWorkspace:
    """What the kernels write, allocated once a size. `chunk` is a power of two."""

    size: Size
    chunk: int
    rows: Tensor  # [slots] int32, the row that each slot scores; -1: none
    scratch: Tensor  # [slots, V] float32, rows under constraints
    cuts: Tensor  # [3, slots] int32, see fused/thresholds.py
    found: Tensor  # [slots, 2, room] int32, candidates for the cut
    partials: Tensor  # [7, slots, chunks] float32, see fused/score.py
    residual: Tensor  # [J, S] float32, see fused/walk.py
    emission: Tensor  # [5, J] int32, see fused/walk.py
    result: Tensor  # [J, width] int32

    @classmethod
    def of(cls, size: Size, device: torch.device | str = "cpu", chunk: int = CHUNK) -> VerifyWorkspace:
        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        slots, real = size.slots, torch.float32
        return cls(
            size=size,
            chunk=chunk,
            rows=torch.arange(slots, dtype=torch.int32, device=device),
            scratch=empty(slots if size.constrains else 1, size.vocab, dtype=real),
            cuts=empty(3, slots),
            found=empty(slots if size.filters else 1, 2, ROOM * chunk // CHUNK),
            partials=empty(7, slots, -(-size.vocab // chunk), dtype=real),
            residual=empty(size.jobs, max(size.support, 1), dtype=real),
            emission=empty(5, size.jobs),
            result=empty(size.jobs, size.width),
        )


def verify(logits: Tensor, batch: VerifyBatch, workspace: VerifyWorkspace) -> VerifyResult:
    """Verify all jobs. logits [>= N, V] bfloat16, float16 or float32, whose rows are contiguous; unchanged.

    Nothing waits for the device. The result is a view of the workspace, and valid until its next use.
    Raises ValueError when the shapes do not fit each other.
    """
    size = batch.size
    if workspace.size != size or logits.shape[0] < size.rows or logits.shape[1] != size.vocab:
        raise ValueError(f"logits {tuple(logits.shape)} and {workspace.size} do not fit {size}")
    if logits.stride(1) != 1 or size.jobs == 0:
        raise ValueError("verification needs a job, and rows of logits that are contiguous")
    from gammaray.kernels.fused import emit, score, thresholds, walk
    from gammaray.kernels.fused import logits as processing

    with torch.cuda.device_of(logits):
        for first, rows in _passes(batch, workspace):
            if size.constrains:
                processing.constrain(logits, rows, batch, workspace)
            if size.filters:
                thresholds.cut(logits, rows, batch, workspace)
            score.score(logits, rows, batch, workspace)
            walk.walk(logits, rows, batch, workspace, first)
        if size.support:
            emit.emit(logits, batch, workspace)
    return VerifyResult.of(workspace.result, size.depth)


def warm_up(vocab: int, support: int, dtype: torch.dtype, device: torch.device) -> None:
    """Launch whatever a batch may need on one of padding only, so that no step waits for a compiler.

    `support`: tokens of q of this engine's drafters. For logits [*, vocab] of `dtype`.
    """
    logits = torch.zeros(2, vocab, dtype=dtype, device=device)
    for tokens in (0, min(support, vocab)):
        for levels in (False, True):
            size = Size(1, 2, vocab, 1, tokens, filters=True, constrains=True, levels=levels)
            verify(logits, VerifyBatch.empty(size, device), VerifyWorkspace.of(size, device))


def _passes(batch: VerifyBatch, workspace: VerifyWorkspace) -> Iterator[tuple[bool, Tensor]]:
    """(whether it is the first, the row that each slot scores) of each time that the kernels are launched."""
    if not batch.size.levels:
        yield True, workspace.rows
        return
    yield True, batch.jobs[Job.FIRST_ROW]
    for _ in range(batch.size.depth):
        yield False, workspace.rows


def _shapes(size: Size) -> tuple[tuple[int, int], ...]:
    return (
        (len(Job), size.jobs),
        (len(Node), size.rows),
        (size.rows if size.support else 0, size.support),
        (size.rows if size.support else 0, size.support),
        (len(Edit), size.edits),
        (1, size.bans),
        (size.masks, size.words),
    )


assert MAX_TREE_NODES == 64  # children of a node are searched in one vector of a walk
