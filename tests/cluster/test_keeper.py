"""The keeper's rounds over a crew without Ray; test_islands.py sees it with real workers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from gammaray.actors.crew import Order
from gammaray.actors.draft import Load, Post, Report
from gammaray.actors.place import Place, Whereabouts
from gammaray.actors.pool import SILENT_S, Keeper, Memory
from gammaray.config import parse
from gammaray.routing.pools import LONGEST_BACKOFF_S

POOL = ("bank", "small")
ROUND_S = 0.5


class Crew:
    """Workers start within `starts_after` rounds. `troubled` ones say that instead of answering."""

    def __init__(self) -> None:
        self.now = 0.0
        self.posts: dict[str, Post] = {}
        self.starting: dict[str, int] = {}
        self.loads: dict[str, Load] = {}
        self.draining: set[str] = set()
        self.silent: set[str] = set()
        self.dead: dict[str, Exception] = {}
        self.moved: dict[str, tuple[str, ...]] = {}  # to other devices
        self.events: list[str] = []
        self.starts_after = 1
        self.refuses: Exception | None = None

    def names(self) -> set[str]:
        return set(self.posts)

    def start(self, post: Post, order: Order) -> None:
        assert post.name not in self.posts
        self.events.append(f"start {label(post)}")
        if self.refuses:
            raise self.refuses
        self.posts[post.name], self.starting[post.name] = post, self.starts_after

    def ask(self, names: set[str]) -> dict[str, Report | Exception]:
        answers: dict[str, Report | Exception] = {}
        for name in names - self.silent:
            self.starting[name] -= self.starting[name] > 0
            if name in self.dead:
                answers[name] = self.dead[name]
            elif not self.starting[name]:
                post = self.posts[name]
                where = Whereabouts("id", post.place.labels, self.moved.get(name, post.place.devices))
                load = self.loads.get(name, Load())
                answers[name] = Report(post, f"at {label(post)}", where, load, name in self.draining)
        return answers

    def drain(self, name: str) -> None:
        if name not in self.draining:
            self.events.append(f"drain {label(self.posts[name])}")
        self.draining.add(name)

    def kill(self, name: str) -> None:
        if name in self.posts:
            self.events.append(f"kill {label(self.posts.pop(name))}")
        for known in (self.draining, self.silent):
            known.discard(name)
        self.dead.pop(name, None)

    def name(self, worker: str) -> str:
        return next(name for name, post in self.posts.items() if label(post) == worker)


def label(post: Post) -> str:
    return f"{post.version}.{post.worker}"


class Case:
    """A keeper and what it looks after."""

    def __init__(self, workers: int = 2, most: int = 3) -> None:
        self.config = parse(
            {
                "target": {"model": "big"},
                "drafters": {"small": {"method": "model", "model": "tiny"}},
                "tenants": {"bank": {"drafter": "small", "pool": {"workers": workers, "max_workers": most}}},
            },
            "test",
        )
        self.crew, self.most = Crew(), most
        self.memory = Memory()
        self.order = self.of("v1")
        self.keeper = self.hire()

    def of(self, version: str) -> Order:
        posts = [
            Post(*POOL, version, i, Place({"gammaray/node": "a"}, (f"GPU-{i}",))) for i in range(self.most)
        ]
        return Order(self.config, tuple(posts), lambda config, name: pytest.fail("loads nothing"))

    def hire(self) -> Keeper:
        return Keeper(self.crew, self.memory, self.remember, lambda: self.crew.now)

    def remember(self, memory: Memory) -> None:
        self.memory = memory

    def rounds(self, count: int = 1) -> list[str]:
        """What happened in them."""
        self.crew.events.clear()
        for _ in range(count):
            self.keeper.tick(self.order)
            self.crew.now += ROUND_S
        return list(self.crew.events)

    @property
    def ready(self) -> list[str]:
        return [label(report.post) for report in self.reports if not report.draining]

    @property
    def reports(self) -> tuple[Report, ...]:
        return self.keeper.reports.get(POOL, ())


@pytest.fixture
def case() -> Case:
    case = Case()
    assert case.rounds(4) == ["start v1.0", "start v1.1"]
    assert case.ready == ["v1.0", "v1.1"]
    return case


def test_a_worker_that_loads_takes_nothing() -> None:
    case = Case()
    case.crew.starts_after = 3
    case.rounds(2)
    assert case.ready == []
    case.rounds(3)
    assert case.ready == ["v1.0", "v1.1"]


def test_one_that_dies_is_started_again_in_its_place_but_not_at_once(case: Case) -> None:
    case.crew.dead[case.crew.name("v1.1")] = RuntimeError("killed")
    assert case.rounds() == ["kill v1.1"]
    assert case.ready == ["v1.0"]
    assert list(case.keeper.troubles.values()) == ["RuntimeError: killed"]
    events = case.rounds(8)
    assert events == ["start v1.1"]
    assert case.ready == ["v1.0", "v1.1"]


def test_one_that_dies_again_and_again_is_tried_more_and_more_rarely() -> None:
    case = Case(workers=1, most=1)
    starts = []
    for _ in range(2000):
        starts += [case.crew.now] * case.rounds().count("start v1.0")
        case.crew.dead = {name: RuntimeError("out of memory") for name in case.crew.posts}
    gaps = [b - a for a, b in pairwise(starts)]
    assert max(gaps) <= LONGEST_BACKOFF_S + 2 * ROUND_S
    assert gaps[-1] >= LONGEST_BACKOFF_S > 8 * gaps[0]


def test_a_post_that_loses_worker_after_worker_comes_last(case: Case) -> None:
    for _ in range(2):
        case.crew.dead[case.crew.name("v1.0")] = RuntimeError("a broken GPU")
        case.rounds(12)
    assert case.ready == ["v1.1", "v1.2"]


def test_one_on_other_devices_than_planned_is_refused(case: Case) -> None:
    name = case.crew.name("v1.0")
    case.crew.moved[name] = ("GPU-7",)
    assert case.rounds() == ["kill v1.0"]
    assert case.keeper.troubles[name] == "it sees the devices GPU-7 instead of GPU-0"
    assert case.ready == ["v1.1"]


def test_one_that_falls_silent_is_replaced(case: Case) -> None:
    case.crew.silent.add(case.crew.name("v1.0"))
    assert case.rounds(int(SILENT_S / ROUND_S) - 1) == []
    assert case.ready == ["v1.0", "v1.1"]
    assert case.rounds(3)[0] == "kill v1.0"


def test_a_name_that_ray_still_knows_is_a_loss_like_any_other() -> None:
    case = Case()
    case.crew.refuses = ValueError("the name is taken")
    case.rounds(2)
    case.crew.refuses = None
    case.rounds(20)
    assert case.ready == ["v1.0", "v1.1"]


def test_a_keeper_that_starts_again_changes_nothing(case: Case) -> None:
    case.keeper = case.hire()
    assert case.rounds(3) == []
    assert case.ready == ["v1.0", "v1.1"]


def test_a_keeper_that_starts_again_knows_a_worker_that_it_was_just_about_to_start() -> None:
    case = Case()
    case.keeper.tick(case.order)
    assert set(case.memory.posts) == set(case.crew.posts)


def test_a_worker_that_nobody_ordered_is_ended(case: Case) -> None:
    stray = Post(*POOL, "v0", 9)
    case.crew.posts[stray.name], case.crew.starting[stray.name] = stray, 0
    case.keeper = case.hire()
    assert case.rounds() == []
    assert stray.name not in case.crew.posts


def test_a_new_version_takes_over_before_the_old_one_goes(case: Case) -> None:
    case.crew.loads = {name: Load(sequences=3) for name in case.crew.posts}
    case.order = case.of("v2")
    events = []
    for _ in range(40):
        events += case.rounds()
        assert len(case.ready) >= 2
    assert set(case.ready) == {"v2.0", "v2.1"}
    assert not any(event.startswith("kill") for event in events)  # they still draft
    assert len(case.reports) == 4
    case.crew.loads.clear()
    assert sorted(case.rounds(20)) == ["kill v1.0", "kill v1.1"]


def test_a_keeper_lost_during_a_switch_does_not_cut_it_short(case: Case) -> None:
    case.crew.loads = {name: Load(sequences=3) for name in case.crew.posts}
    case.order = case.of("v2")
    case.rounds(30)
    case.keeper = case.hire()
    assert case.rounds(10) == []
    assert set(case.ready) == {"v2.0", "v2.1"}


def test_busy_workers_get_one_more_which_goes_when_it_is_quiet(case: Case) -> None:
    case.crew.loads = {name: Load(sequences=9, queued=20, busy=1.0) for name in case.crew.posts}
    assert case.rounds(100) == ["start v1.2"]
    assert case.ready == ["v1.0", "v1.1", "v1.2"]
    case.crew.loads.clear()
    events = case.rounds(1000)
    assert [event.split()[0] for event in events] == ["drain", "kill"]
    assert len(case.ready) == 2


def test_a_pool_that_is_gone_has_no_workers(case: Case) -> None:
    case.order = replace(case.order, posts=())
    assert sorted(case.rounds()) == ["kill v1.0", "kill v1.1"]
    assert case.keeper.reports == {}
