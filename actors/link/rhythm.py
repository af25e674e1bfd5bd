"""When a draft worker may draft ahead: never so that a question has to wait, and not where it rarely pays."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

GAPS = 16  # rounds by which the time until the next question is judged
SURVEY = 16  # rounds between two that draft ahead although it rarely hits
RARE = 0.1  # hit rate below which drafting ahead is not worth its heat
JUDGED = 32  # drafts, before a hit rate counts
MOMENT_S = 0.0002  # between the end of a pass and a question that came meanwhile
IDLE_S = 1.0  # after which the next question says nothing about the rhythm


@dataclass(slots=True)
class Rhythm:
    """When the next question is due, and whether drafting ahead pays. Times in seconds."""

    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS))  # from an answer to a question
    passes: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS))
    last_answer: float | None = None
    last_pass: tuple[float, float] = (-1.0, -1.0)  # begin and end
    since_pass: int = 0  # rounds
    hit_rate: float = 1.0  # of drafts in rounds that could hit; fades
    judged: int = 0
    ahead: bool = False  # the last round drafted ahead
    since_survey: int = 0

    def asked(self, now: float) -> None:
        """A question is taken up. It may have come while a pass ran, and then counts from the pass's begin:
        else a pass that made it wait would be the reason for the next one.
        """
        began, ended = self.last_pass
        came = began if now - ended < MOMENT_S else now
        if self.last_answer is not None and now - self.last_answer < IDLE_S:
            self.gaps.append(max(0.0, came - self.last_answer))

    def answered(self, now: float) -> None:
        self.last_answer = now

    def passed(self, began: float, ended: float) -> None:
        self.passes.append(ended - began)
        self.last_pass, self.since_pass = (began, ended), 0

    def allows(self, now: float) -> bool:
        """A pass of the usual cost ends before the question that is due earliest, going by the last ones.

        One in a while is allowed in any case: what a pass costs may have changed.
        """
        if self.since_pass >= SURVEY or not self.gaps or not self.passes or self.last_answer is None:
            return True
        due = self.last_answer + sorted(self.gaps)[len(self.gaps) // 4]
        return now + sorted(self.passes)[len(self.passes) // 2] <= due

    def worth_while(self, drafts: int, hits: int) -> bool:
        """Takes in a round; whether to draft ahead for it."""
        if self.ahead and drafts:
            self.judged += drafts
            self.hit_rate += (hits / drafts - self.hit_rate) * min(1.0, drafts / JUDGED)
        self.since_survey += 1
        self.since_pass += 1
        self.ahead = self.judged < JUDGED or self.hit_rate >= RARE or self.since_survey >= SURVEY
        if self.ahead:
            self.since_survey = 0
        return self.ahead
