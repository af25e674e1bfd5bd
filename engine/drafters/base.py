"""The drafter protocol: what the engine asks of everything that proposes tokens.

The same calls serve an n-gram table in this process, a model on the target's GPU and a
worker across a link: `begin` may return before the draft exists, `collect` waits for it until a
deadline, and a request that is missing from the answer decodes plainly for that round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch

from gammaray.types import Cause, Reuse, SamplingParams

Drawn = Literal["deterministic", "iid", "without_replacement"]


@dataclass(frozen=True, slots=True)
class DraftView:
    """One sequence that wants a draft this round.

    `length` is the number of committed tokens (prompt and output). A drafter whose own state is at
    another length is stale: it must leave the sequence out instead of drafting from the wrong prefix.
    """

    rid: str
    length: int
    depth: int  # at most this many levels
    width: int  # at most this many children a level
    sampling: SamplingParams  # a sampling drafter draws from q after the same processing as p
    sequence: int  # noise key: (sampling.seed, sequence, position)
    coupled: bool = True  # sampling drafters: draw with the target's own noise, or with noise of their own
    # The target's block table, for a drafter that runs over its pages; node i of the draft has slot
    # `length` + i there. Never leaves this process.
    blocks: Sequence[int] = ()

    @property
    def nodes(self) -> int:
        """At most this many in all."""
        return self.depth * self.width


@dataclass(frozen=True, slots=True)
class DraftTree:
    """K proposed nodes, parents before children, siblings in the order they were drawn.

    `parents[i]` is -1 for a child of the root (the last committed token). `q_ids`/`q_probs` hold, for a
    sampled node, the distribution that it was drawn from (before any sibling was removed); ids with q > 0 are
    distinct.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    drawn: Drawn = "deterministic"
    q_ids: torch.Tensor | None = None  # [K, S] int64, S <= 64
    q_probs: torch.Tensor | None = None  # [K, S] float32, rows sum to 1; 0 pads
    confidence: tuple[float, ...] | None = None  # per node; never looks at a sampled token
    whole: bool = False  # not to be trimmed: its drafter learns from what the target says behind each node

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Levels."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """The tokens from the root to each node, which come last."""
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return paths

    def subtree(self, nodes: Sequence[int]) -> DraftTree:
        """Of these nodes, parents before children; the parent of each is among them, or the root."""
        place = {node: at for at, node in enumerate([-1, *nodes], start=-1)}
        kept = list(nodes)
        return replace(
            self,
            tokens=tuple(self.tokens[node] for node in nodes),
            parents=tuple(place[self.parents[node]] for node in nodes),
            q_ids=None if self.q_ids is None else self.q_ids[kept],
            q_probs=None if self.q_probs is None else self.q_probs[kept],
            confidence=None if self.confidence is None else tuple(self.confidence[node] for node in nodes),
        )


@dataclass(frozen=True, slots=True)
class Ticket:
    """A draft that was asked for; `payload` belongs to the drafter."""

    views: tuple[DraftView, ...]
    payload: object = None


class Drafter(Protocol):
    """See architecture.md, "The drafter protocol". Called from the engine's thread only."""

    vocab_size: int | None  # None: proposes only tokens of the context

    def begin(self, views: Sequence[DraftView]) -> Ticket: ...

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        """Drafts by rid. `deadline` is on the engine's clock; late or stale sequences are missing."""

    def commit(self, rid: str, tokens: Sequence[int], features: torch.Tensor | None = None) -> None:
        """Append tokens that the target committed. Unknown rids are ignored. `features`: see `Featured`."""

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        """Make the state of `rid` equal to this whole token sequence (also how a sequence begins).

        Sequences share cached prefixes only under an equal `salt` (the tenant).
        """

    def release(self, rid: str) -> None:
        """Forget `rid`. Unknown rids are ignored."""

    def length(self, rid: str) -> int | None:
        """Tokens that the state of `rid` stands for, for the state oracle; None when unknown."""


@runtime_checkable
class Featured(Protocol):
    """A drafter that continues the target's hidden states.

    It cannot catch up from tokens alone. `catch_up` reaches as far as its own prefix cache does, and `length`
    tells how far that is, at least 1; the target then reuses no more of its own cache, so that what is
    missing passes through it. From there on every pass of the target ends in a `commit`, whose `features`
    [len(tokens), F] are for each token the hidden states that it was predicted from, which are those of the
    token before it. F = len(layers) * H, of `layers` as `ModelRunner.forward_features` counts them.

    One that needs only what is behind the last token may say that it has reached all tokens: the pass that
    the target cannot skip ends in the commit that brings it.
    """

    layers: tuple[int, ...]


@runtime_checkable
class Observing(Protocol):
    """A drafter that learns from what the target thinks, also behind nodes that it rejected."""

    top: int  # likeliest tokens that it wants of each

    def observe(self, rid: str, tree: DraftTree | None, likeliest: torch.Tensor) -> None:
        """The target's likeliest tokens [1 + K, top] int64, the best first, behind the last committed token
        and behind each node of the `tree` that it verified. The round's `commit` comes next."""


@runtime_checkable
class Troubled(Protocol):
    """A drafter that may be away."""

    def trouble(self, rid: str) -> Cause | None:
        """Why the last `collect` had no draft for `rid`, if it should have had one."""


@runtime_checkable
class Failing(Protocol):
    """A drafter that outlives failures of its parts."""

    def take_failures(self) -> int:
        """Since this was asked last."""


@runtime_checkable
class Caching(Protocol):
    """A drafter with a prefix cache in this process."""

    def take_reuse(self) -> Reuse:
        """Since this was asked last."""


@runtime_checkable
class Anticipating(Protocol):
    """A drafter that can use the time in which the target verifies (math.md section 3b)."""

    hits: frozenset[str]  # rids whose draft, in the last `collect`, had been made ahead

    def anticipate(self) -> Iterator[None]:
        """Drafts ahead for what `collect` gave out last, one pass of the draft model per `next`.

        May be dropped between passes, and must be before any other call.
        """
