"""A model drafter that drafts ahead in each round, as a draft worker does while the target verifies."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from gammaray.engine.drafters.base import DraftTree, Ticket
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.runner import ModelRunner


class AheadDrafter(ModelDrafter):
    """Is interrupted after `passes` forward passes, in turn."""

    def __init__(
        self, runner: ModelRunner, draft_sampling: bool = False, passes: tuple[int, ...] = (99,)
    ) -> None:
        super().__init__(runner, draft_sampling)
        self.passes, self.rounds = passes, 0

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        trees = super().collect(ticket, deadline)
        passes = self.passes[self.rounds % len(self.passes)]
        for part in (passes // 2, passes - passes // 2):  # as when another replica's question comes between
            for _ in islice(self.anticipate(), part):
                pass
        self.rounds += 1
        return trees
