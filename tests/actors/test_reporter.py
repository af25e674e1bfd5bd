"""What a replica tells the controller, when the controller is there, and when it is not."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.actors.reporter import LEFT_MOST, Reporter
from gammaray.routing.bulletin import Answer, Origin
from gammaray.routing.window import COLUMN, Window
from gammaray.types import DraftLinks, KeyCounts, PolicySnapshot, SpeculationStats, StepReport

INTERVAL_S = 5.0


class Desk:
    """Keeps what comes, once; `kept` lags behind as a tick would make it. `down`: it does not answer."""

    def __init__(self) -> None:
        self.windows: dict[int, Window] = {}
        self.sent: list[tuple[int, ...]] = []
        self.kept = 0
        self.policy = PolicySnapshot(1)
        self.down = self.forgets = self.deaf = False

    def tell(self, origin: Origin, windows: tuple[Window, ...]) -> Answer:
        if self.down:
            raise ConnectionError
        self.sent.append(tuple(window.number for window in windows))
        for window in windows:
            assert window.source == origin.source
            self.windows.setdefault(window.number, window)
        if self.deaf:  # the answer is lost
            raise ConnectionError
        return Answer(self.policy, self.kept)

    def tick(self) -> None:
        self.kept = max(self.windows, default=self.kept)

    def crash(self) -> None:
        """Before a tick kept them."""
        self.windows = {number: one for number, one in self.windows.items() if number <= self.kept}

    @property
    def emitted(self) -> float:
        return sum(float(one.counts[:, COLUMN["emitted"]].sum()) for one in self.windows.values())


class Case:
    def __init__(self) -> None:
        self.desk, self.applied, self.now = Desk(), list[int](), 0.0
        self.reporter = Reporter(
            Origin("r"), self.desk, lambda policy: self.applied.append(policy.version), self.links, INTERVAL_S
        )

    @staticmethod
    def links() -> tuple[DraftLinks, ...]:
        return (DraftLinks("bank", "small", 2),)

    def emit(self, tokens: int) -> None:
        stats = SpeculationStats(rounds=1, emitted=tokens)
        counts = (KeyCounts("bank", "default", None, 1, stats),)
        self.reporter.add(StepReport(0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, counts))

    def rounds(self, seconds: int) -> None:
        for _ in range(seconds):
            with suppress(ConnectionError):
                self.reporter.round(self.now)
            self.now += 1.0


@pytest.fixture
def case() -> Case:
    return Case()


def test_a_window_an_interval_and_the_policy_every_second(case: Case) -> None:
    case.emit(3)
    case.rounds(3)
    case.desk.tick()
    case.rounds(4)
    assert case.desk.sent == [(1,), (), (), (), (), (2,), ()]
    assert case.desk.windows[1].links == Case.links()
    assert case.desk.emitted == 3


def test_a_policy_is_applied_once(case: Case) -> None:
    case.rounds(3)
    case.desk.policy = PolicySnapshot(4)
    case.rounds(3)
    assert case.applied == [1, 4]


def test_what_was_not_kept_comes_again_with_its_number(case: Case) -> None:
    case.emit(3)
    case.rounds(1)
    case.desk.crash()
    assert case.desk.emitted == 0
    case.rounds(5)
    assert case.desk.sent[-1] == (1, 2)
    assert case.desk.emitted == 3


def test_what_came_through_without_an_answer_counts_once(case: Case) -> None:
    case.emit(3)
    case.desk.deaf = True
    case.rounds(1)
    case.desk.deaf = False
    case.emit(4)
    case.rounds(6)
    assert case.desk.sent == [(1,), (), (), (), (), (1, 2), ()]
    assert case.desk.emitted == 7


def test_while_the_controller_is_gone_the_last_policy_stays_and_nothing_is_lost(case: Case) -> None:
    case.rounds(1)
    case.desk.down = True
    for _ in range(600):
        case.emit(1)
        case.rounds(1)
    case.desk.down = False
    case.rounds(5)
    assert max(len(sent) for sent in case.desk.sent) <= LEFT_MOST
    case.desk.tick()
    case.rounds(10)
    assert case.desk.emitted == 600
    assert case.applied == [1]


def test_the_end_tells_what_is_left(case: Case) -> None:
    case.rounds(1)
    case.desk.tick()
    case.rounds(1)
    case.emit(9)
    case.reporter.finish()
    assert case.desk.emitted == 9


EVENTS = st.lists(
    st.sampled_from(["emit", "tick", "crash", "down", "up", "deaf", "hears", "wait"]), max_size=40
)


@given(EVENTS)
def test_whatever_fails_every_token_counts_once(events: list[str]) -> None:
    case, emitted = Case(), 0
    for event in events:
        if event == "emit":
            case.emit(1)
            emitted += 1
        elif event in ("tick", "crash"):
            getattr(case.desk, event)()
        elif event in ("down", "up"):
            case.desk.down = event == "down"
        elif event in ("deaf", "hears"):
            case.desk.deaf = event == "deaf"
        else:
            case.rounds(6)
        assert case.desk.emitted <= emitted
    case.desk.down = case.desk.deaf = False
    for _ in range(3):
        case.rounds(6)
        case.desk.tick()
    assert case.desk.emitted == emitted
