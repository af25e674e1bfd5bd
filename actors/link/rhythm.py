"""When a draft worker may draft ahead: never so that a question has to wait, and not where it rarely pays."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

GAPS = 16  # rounds by which the time until the next question is judged
SURVEY = 16  # rounds between two that draft ahead although it rarely hits
RARE = 0.1  # hit rate below which drafting ahead is not worth its heat
JUDGED = 32  # drafts, before a hit rate counts
RETRY = 16  # rounds until a pass that did not fit is tried again; doubles while it still does not
MOMENT_S = 0.0002  # between the end of a pass and a question that came meanwhile
IDLE_S = 1.0  # after which the next question says nothing about the rhythm


@dataclass(slots=True)
class Rhythm:
    """When the next question is due, and whether drafting ahead pays. Times in seconds."""

    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS))  # from an answer to a question
    passes: dict[int, deque[float]] = field(default_factory=dict)  # by their place behind an answer
    # Of passes that did not fit: rounds that they were left out, and after how many they are tried again.
    waits: dict[int, tuple[int, int]] = field(default_factory=dict)
    place: int = 0  # of the next pass
    refused: bool = False  # it did not fit
    last_answer: float | None = None
    last_pass: tuple[float, float] = (-1.0, -1.0)  # begin and end
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
        if self.refused:
            rounds, limit = self.waits.get(self.place, (0, RETRY))
            self.waits[self.place] = rounds + 1, limit

    def answered(self, now: float) -> None:
        self.last_answer, self.place, self.refused = now, 0, False

    def passed(self, began: float, ended: float) -> None:
        if self.place in self.waits:  # it was tried although it did not fit
            _, limit = self.waits[self.place]
            self.waits[self.place] = 0, 2 * limit
        self.passes.setdefault(self.place, deque(maxlen=GAPS)).append(ended - began)
        self.place, self.last_pass = self.place + 1, (began, ended)

    def allows(self, now: float) -> bool:
        """The next pass, at its usual cost, ends before the question that is due earliest.

        Usual is what passes in its place cost lately: the one that chooses outcomes costs more than the
        others. What is refused is not measured, so after a while it is tried again. To ask changes nothing.
        """
        if not self.gaps or self.place not in self.passes or self.last_answer is None:
            return True
        due = self.last_answer + sorted(self.gaps)[len(self.gaps) // 4]
        if now + median_low(self.passes[self.place]) <= due:
            self.waits.pop(self.place, None)
            return True
        rounds, limit = self.waits.get(self.place, (0, RETRY))
        self.refused = rounds < limit
        return not self.refused

    def worth_while(self, drafts: int, hits: int) -> bool:
        """Takes in a round; whether to draft ahead for it. What there was no time for says nothing."""
        if self.ahead and drafts and (hits or not self.refused):
            self.judged += drafts
            self.hit_rate += (hits / drafts - self.hit_rate) * min(1.0, drafts / JUDGED)
        self.since_survey += 1
        self.ahead = self.judged < JUDGED or self.hit_rate >= RARE or self.since_survey >= SURVEY
        if self.ahead:
            self.since_survey = 0
        return self.ahead
