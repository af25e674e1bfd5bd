"""Attention that gives a token the same bits wherever it is computed: decoded, drafted, or in a prompt.

What a token sees is laid out as plain decoding would have it: the keys of its own path, in order of position.
A draft tree thus falls apart into its paths from root to leaf, and a node is computed with the first leaf
below it. Each path is one batch entry of `cpu.py`'s SDPA calls, padded to query and key counts that have been
proven to agree, so the sums of a token run over the same keys in the same order however large the call is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gammaray.kernels import cpu
from gammaray.kernels.invariant import REFERENCE, NotInvariant, Sizes, cancelling, proven_rows

if TYPE_CHECKING:
    from gammaray.kernels.api import PagedBatch

STRIDE = 512  # keys that SDPA takes at a time on CPUs: only the last, shorter stride may be of another size
QUERIES = (*range(1, 16), *range(16, 32, 4), *range(32, 64, 8), *range(64, 128, 16), *range(128, 257, 32))
TAILS = tuple(range(32, STRIDE + 1, 32))


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Query and key counts of a path with which a token keeps its bits."""

    queries: Sizes
    tail: Sizes  # keys of the last stride

    def keys(self, n: int) -> int:
        full = (n - 1) // STRIDE * STRIDE
        return full + self.tail.fit(n - full)

    def shared(self, other: AttentionSizes) -> AttentionSizes:
        """The sizes that serve both. Raises NotInvariant where none does."""
        return AttentionSizes(self.queries.shared(other.queries), self.tail.shared(other.tail))


@dataclass(frozen=True, slots=True)
class Path:
    """Tokens of one row that see one sequence of keys, each up to its own position."""

    row: int
    tokens: tuple[int, ...]  # ascending, and so are their positions
    nodes: int  # bit i: tree node i follows the committed prefix
    keys: int  # up to the last token's own


def group(batch: PagedBatch, layout: cpu.Layout, sizes: AttentionSizes) -> cpu.Groups:
    """What `cpu.group` does, path by path."""
    paths = list(split(batch, sizes.queries.most))
    queries = [sizes.queries.fit(len(path.tokens)) for path in paths]
    keys = [sizes.keys(path.keys) for path in paths]
    parts: list[cpu.Group] = []
    fed: list[int] = []
    for members in cpu.group_rows(queries, keys):
        most = max(queries[i] for i in members)
        tokens = [token for i in members for token in _padded(paths[i].tokens, most)]
        longest = max(keys[i] for i in members)
        parts.append(_group(batch, [paths[i] for i in members], tokens, longest, layout))
        fed += tokens
    return cpu.Groups(tuple(parts), cpu.order(fed, len(batch.positions)))


def split(batch: PagedBatch, most: int) -> Iterator[Path]:
    """The paths of every row, none with more than `most` tokens."""
    starts, positions = batch.cu_seqlens.tolist(), batch.positions.tolist()
    masks = [
        sum(word % 2**64 << 64 * i for i, word in enumerate(words)) for words in batch.ancestors.tolist()
    ]
    for row in range(len(starts) - 1):
        paths: dict[int, list[int]] = {}  # nodes of a leaf's path -> its tokens, the last one first
        for token in range(starts[row + 1] - 1, starts[row] - 1, -1):  # children before parents
            own = masks[token]
            paths.setdefault(next((path for path in paths if own & ~path == 0), own), []).append(token)
        for nodes, tokens in paths.items():
            tokens.reverse()
            for first in range(0, len(tokens), most):
                chunk = tuple(tokens[first : first + most])
                yield Path(row, chunk, nodes, positions[chunk[-1]] + 1)


def prove(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> AttentionSizes:
    """Try all sizes for layers of this shape. Raises NotInvariant where none agree.

    A query sees a prefix of the keys, so that sizes larger than what it needs are tried too.
    """
    trial = _Trial(heads, kv_heads, dim, dtype)
    some = torch.arange(REFERENCE)
    tails = [n for n in TAILS if torch.equal(trial(some, n, n), trial(some, n, STRIDE))]
    for n in (STRIDE + tail for tail in tails):
        if not torch.equal(trial(some, n, n), trial(some, n, 2 * STRIDE)):
            raise NotInvariant(f"{n} keys do not agree with {2 * STRIDE}")
    queries = Sizes(QUERIES)
    for n in (*tails, 2 * STRIDE):
        queries = queries.shared(proven_rows(partial(trial, seen=n, keys=n), trial.ids, QUERIES))
    return AttentionSizes(queries, Sizes(tuple(tails)))


class _Trial:
    """256 queries over 1024 keys, where nothing but rounding is left of scores and of results.

    A score's terms cancel; large ones leave enough rounding to change the softmax. Keys come in equal pairs
    with opposite values.
    """

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.arange(256)
        self._group_size, self._dtype = heads // kv_heads, dtype
        self._shares = torch.rand(len(self.ids), generator=generator)  # of the keys, seen by each query
        self._shares[::5] = 1
        q, k = cancelling(len(self.ids) * heads, STRIDE * kv_heads, dim, dtype)
        self._q = 64 * q.view(-1, heads, dim)
        pairs = torch.arange(2 * STRIDE) // 2
        signs = 1 - 2 * (torch.arange(2 * STRIDE)[:, None, None] % 2)
        shuffle = torch.cat([torch.randperm(16, generator=generator) + i for i in range(0, 2 * STRIDE, 16)])
        values = torch.randn(STRIDE, kv_heads, dim, generator=generator)
        values *= 4.0 ** torch.randint(-3, 4, (STRIDE, 1, 1), generator=generator)
        self._k = 64 * k.view(-1, kv_heads, dim)[pairs][shuffle]  # [1024, Hkv, D]
        self._v = (values[pairs] * signs)[shuffle].to(dtype)

    def __call__(self, ids: Tensor, seen: int, keys: int) -> Tensor:
        """Queries `ids`, which see at most `seen` of the leading keys, in one call over `keys` keys."""
        lengths = 16 + (self._shares[ids, None] * (seen - 16)).long() // 16 * 16
        bias = torch.zeros(len(ids), keys, dtype=self._dtype)
        bias = bias.masked_fill_(torch.arange(keys) >= lengths, float("-inf"))[None, None]
        fold = cpu.folds(len(ids), self._group_size)
        part = cpu.Group(1, None, range(keys), fold, bias.repeat(1, 1, self._group_size if fold else 1, 1))
        k, v = (x[:keys].clone()[None].transpose(1, 2) for x in (self._k, self._v))
        return cpu.sdpa(self._q[ids], k, v, part, scaling=self._q.shape[2] ** -0.5)


def _padded(tokens: Sequence[int], length: int) -> list[int]:
    return [*tokens, *[tokens[-1]] * (length - len(tokens))]


def _group(
    batch: PagedBatch, paths: Sequence[Path], tokens: list[int], longest: int, layout: cpu.Layout
) -> cpu.Group:
    index = torch.arange(longest)
    fed = torch.tensor(tokens).view(len(paths), -1)  # [R, Q]
    fold = cpu.folds(fed.shape[1], layout.group_size)
    positions = batch.positions[fed][:, :, None]  # [R, Q, 1]
    seen = index <= positions
    if layout.window is not None:
        seen &= index > positions - layout.window
    bias = torch.zeros(seen.shape, dtype=layout.dtype).masked_fill_(~seen, float("-inf"))[:, None]
    bias = bias.repeat(1, 1, layout.group_size, 1) if fold else bias
    return cpu.Group(len(paths), fed.flatten(), _slots(batch, paths, index, layout).flatten(), fold, bias)


def _slots(batch: PagedBatch, paths: Sequence[Path], index: Tensor, layout: cpu.Layout) -> Tensor:
    """Physical slots [R, S] of each path's keys by position, padded with slot 0, which is always written."""
    logical = index.repeat(len(paths), 1)
    for own, path in zip(logical, paths, strict=True):
        if path.nodes:
            start = int(batch.tree_start[path.row])
            nodes = [start + node for node in range(path.nodes.bit_length()) if path.nodes >> node & 1]
            seen = nodes[: max(0, len(index) - start)]
            own[start : start + len(seen)] = torch.tensor(seen)
    logical *= index < torch.tensor([[path.keys] for path in paths])
    blocks = batch.block_table[[path.row for path in paths]].gather(1, logical // layout.block_size)
    return blocks * layout.block_size + logical % layout.block_size
