"""Rejection verification through the whole engine: three tokens have the target's own joint distribution.

test_verifier_distribution.py proves the rules; this proves that drafter, scheduler and engine hand them the
right noise, positions and q. A planted error shows that the test can fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from support.joint import p_value

from gammaray.engine.drafters.base import DraftTree, Ticket
from gammaray.engine.drafters.model import ModelDrafter


class Overconfident(ModelDrafter):
    """Reports a q that it did not draw from: the planted error."""

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        trees = super().collect(ticket, deadline)
        return {rid: replace(tree, q_probs=_sharpen(tree)) for rid, tree in trees.items()}


def _sharpen(tree: DraftTree):  # type: ignore[no-untyped-def]
    assert tree.q_probs is not None
    sharp = tree.q_probs**3
    return sharp / sharp.sum(-1, keepdim=True)


@pytest.mark.parametrize("gamma, width", [(3, 1), (2, 3)], ids=["chain", "tree"])
def test_the_joint_distribution_is_the_targets(gamma: int, width: int) -> None:
    assert p_value(ModelDrafter, gamma, width) > 1e-3


@pytest.mark.parametrize("gamma, width", [(3, 1), (2, 3)], ids=["chain", "tree"])
def test_a_drafter_that_reports_another_q_is_found_out(gamma: int, width: int) -> None:
    assert p_value(Overconfident, gamma, width) < 1e-6
