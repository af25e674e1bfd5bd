"""Which nodes a draft tree should have, as pure functions: reranking (EAGLE-2), optimal shape (Sequoia)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

LEAST = log(0.1)  # cumulative log-probability below which a node is not worth its verification
Floats = NDArray[np.float64]

# By level, how many children each node of the level above has; the k-th child is the k-th likeliest token.
# Nodes count level by level, siblings together, parents in their order: ((2,), (1, 0)) is a root with two
# children, of which the first has one.
Shape = tuple[tuple[int, ...], ...]


def best_nodes(scores: Sequence[float], parents: Sequence[int], most: int) -> list[int]:
    """Of a deterministic draft the `most` nodes of highest cumulative log-probability, ascending, without
    those under LEAST (EAGLE-2, arXiv 2406.16858, section 4.2).

    A score is at most its parent's, and parents come first, so whoever is kept has its parent kept too.
    """
    likely = [node for node, score in enumerate(scores) if score >= LEAST]
    kept = sorted(sorted(likely, key=lambda node: (-scores[node], node))[:most])
    assert {parents[node] for node in kept} <= {-1, *kept}
    return kept


@dataclass(frozen=True, slots=True)
class Budget:
    """What a draft may have, and what it costs, in plain decoding steps of the target.

    `verify[n]`: a step that verifies n nodes, for n = 0 .. nodes; not falling. `level`: drafting one level.
    """

    nodes: int
    depth: int
    width: int  # children of one node
    verify: Sequence[float]
    level: float

    @classmethod
    def flat(cls, nodes: int, depth: int, width: int, level: float) -> Budget:
        """Verifying costs the same for all sizes: trimming to what the batch has room for comes later."""
        return cls(nodes, depth, width, [1.0] * (nodes + 1), level)


def best_shape(accepted: Sequence[Sequence[float]], budget: Budget) -> Shape:
    """The shape of at least one node that maximises E[tau] / (verify[nodes] + depth * level), where the k-th
    child of an accepted node of depth d is accepted with probability `accepted[d][k]` (Sequoia, arXiv
    2402.12374, section 3.1 and appendix, with probabilities that differ by depth). Ties: the smaller one.
    """
    tables = _solve(accepted, budget)
    expected = 1.0 + tables[0].value[1:, 1:]  # [depth, nodes], for at most so many of either
    depths = np.arange(1, budget.depth + 1)[:, None]  # [depth, 1]
    speed = expected / (np.asarray(budget.verify[1:])[None] + depths * budget.level)  # [depth, nodes]
    nodes, levels = divmod(int(speed.T.argmax()), budget.depth)
    return _laid_out(tables, levels + 1, nodes + 1)


class _Table(NamedTuple):
    """Of the subtrees below a node at one depth, by the levels and the nodes that they may have."""

    value: Floats  # [levels + 1, nodes + 1], accepted tokens to expect
    # [width, levels + 1, nodes + 1]: of the nodes left for the k-th child and later ones, those of the k-th
    given: NDArray[np.int64]


def _solve(accepted: Sequence[Sequence[float]], budget: Budget) -> list[_Table]:
    """By depth of the node, from the deepest up: children share its nodes, the last of them first."""
    size = budget.nodes + 1
    tables: list[_Table] = []
    below = np.zeros((1, size))  # [levels + 1, nodes + 1], of a node one deeper
    for depth in reversed(range(budget.depth)):
        rest = np.zeros((len(below) + 1, size))  # of later children
        own = np.zeros((len(below) + 1, size))  # of one child with its subtree
        given = []
        for chance in reversed(accepted[depth][: budget.width]):
            own[1:, 1:] = chance * (1.0 + below[:, :-1])
            rest, shares = _shared(own, rest)
            given.append(shares)
        tables.append(_Table(rest, np.stack(given[::-1])))
        below = rest
    return tables[::-1]


def _shared(own: Floats, rest: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Best split of n nodes between a child's subtree and later children; [levels, n + 1] each, and how many
    the child gets. Without a child there are no later ones either."""
    size = own.shape[1]
    padded = np.pad(rest, ((0, 0), (size - 1, 0)), constant_values=-np.inf)  # no fewer than no nodes are left
    left = sliding_window_view(padded, size, axis=1)[:, :, ::-1]  # [levels, n, given], of n - given nodes
    sums = own[:, None] + left
    sums[:, :, 0] = 0.0
    shares = sums.argmax(-1)
    return np.take_along_axis(sums, shares[..., None], -1)[..., 0], shares


def _laid_out(tables: Sequence[_Table], levels: int, nodes: int) -> Shape:
    shape = []
    level = [nodes]  # for each node of the level above, the nodes of its subtrees
    for depth in range(levels):
        parts = [_split(tables[depth], levels - depth, here) for here in level]
        if not (level := [part for split in parts for part in split]):
            break
        shape.append(tuple(map(len, parts)))
    return tuple(shape)


def _split(table: _Table, levels: int, nodes: int) -> list[int]:
    """The nodes below each child of a node."""
    parts = []
    for given in table.given:
        if not (share := int(given[levels, nodes])):
            break
        parts.append(share - 1)
        nodes -= share
    return parts
