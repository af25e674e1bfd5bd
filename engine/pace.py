"""When one sequence drafts, and which of its drafts are verified whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

from gammaray.engine.calibration import Rates

SURVEY = 16  # one draft in so many is verified whole
PATIENCE = 4  # drafts in a row of which nothing was worth verifying
FIRST_REST, LONGEST_REST = 8, 64  # rounds without a draft; each rest is twice the one before


@dataclass(slots=True)
class Pace:
    """Of one sequence whose drafts may be trimmed."""

    drafts: int = 0
    idle: int = 0  # drafts in a row that were worth nothing
    rest: int = 0  # rounds without a draft that are still to come
    rates: Rates = field(default_factory=Rates)
    _next: int = FIRST_REST
    _rested: bool = False  # since the last draft

    def survey(self, rid: str, cheap: bool) -> bool:
        """Whether this draft, which is counted, is verified whole. `cheap`: that would cost the step little.

        That does not depend on what is in it; and sequences that run together are not surveyed together. Nor
        is one on its way to a rest: there is hardly anything to learn, in a batch that has no room for it.
        Where there is room, the first draft after a rest is: else what was poor once, as every drafter that
        learns from the text is at its beginning, would never be tested again.
        """
        self.drafts += 1
        rested, self._rested = self._rested, False
        due = (self.drafts + crc32(rid.encode())) % SURVEY == 0 and not 0 < self.idle < PATIENCE
        return due or (rested and cheap)

    def trimmed(self, worth: bool, step: int) -> None:
        """Whether a draft of this step was worth something; if not again and again, the sequence rests.

        It drafts again in a step that is a multiple of its rest: with others, as passes of a draft model for
        all of them cost hardly more than for one.
        """
        if worth:
            self.idle, self._next = 0, FIRST_REST
            return
        self.idle += 1
        if self.idle >= PATIENCE:
            self._rested = True
            self.rest = 1 + self._next + -(step + 1) % self._next  # the round that is not over yet, too
            self._next = min(2 * self._next, LONGEST_REST)

    def end_round(self) -> None:
        self.rest = max(0, self.rest - 1)
