"""The draft phase of a step: every drafter is asked for all its sequences before any answer is awaited."""

from __future__ import annotations

import logging
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence

from gammaray.engine.drafters.base import Drafter, DraftTree, DraftView
from gammaray.engine.scheduler import Slice

log = logging.getLogger(__name__)


def draft(
    slices: Sequence[Slice], drafters: Mapping[str, Drafter], vocab_size: int, deadline: float
) -> dict[str, DraftTree]:
    """Draft trees by rid. What is missing was late, lost or invalid: it decodes plainly this round."""
    by_name: dict[str, list[Slice]] = defaultdict(list)
    for part in slices:
        if part.depth > 0:
            by_name[part.sequence.request.plan.drafter or ""].append(part)
    tickets = {}
    for name, parts in by_name.items():
        try:
            tickets[name] = drafters[name].begin([_view(drafters[name], part) for part in parts])
        except Exception as error:  # a drafter must never take a request down with it
            _log_loss(name, error)
    trees: dict[str, DraftTree] = {}
    for name, ticket in tickets.items():
        try:
            found = drafters[name].collect(ticket, deadline)
        except Exception as error:
            _log_loss(name, error)
            continue
        for part in by_name[name]:
            tree = found.get(part.sequence.rid)
            if tree and well_formed(tree, part.depth, part.width, vocab_size):
                trees[part.sequence.rid] = tree
    return trees


def well_formed(tree: DraftTree, depth: int, width: int, vocab_size: int) -> bool:
    """Real tokens, parents first, within the depth and the nodes that KV was claimed for, q for each node."""
    nodes = len(tree.tokens)
    if len(tree.parents) != nodes or nodes > depth * width:
        return False
    levels: list[int] = []
    for index, parent in enumerate(tree.parents):
        if not -1 <= parent < index:
            return False
        levels.append(1 if parent < 0 else levels[parent] + 1)
    sampled_without_q = tree.drawn != "deterministic" and (tree.q_probs is None or len(tree.q_probs) != nodes)
    in_vocabulary = all(0 <= token < vocab_size for token in tree.tokens)
    return in_vocabulary and max(levels, default=0) <= depth and not sampled_without_q


def _log_loss(name: str, error: Exception) -> None:
    """The frames without the message, which might hold draft tokens."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    kind = type(error).__name__
    log.error("drafter %r failed (%s); its requests decode plainly this round\n%s", name, kind, frames)


def _view(drafter: Drafter, part: Slice) -> DraftView:
    sequence = part.sequence
    if drafter.length(sequence.rid) != len(sequence.tokens):
        drafter.catch_up(sequence.rid, sequence.tokens, sequence.table.salt)
    return DraftView(
        rid=sequence.rid,
        length=len(sequence.tokens),
        depth=part.depth,
        width=part.width,
        sampling=sequence.request.sampling,
        sequence=sequence.index,
        coupled=sequence.request.plan.verification == "coupled",
    )
