"""The registry of drafter versions: each step, then any order of steps beside a plain model of it."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gammaray.config import Tenant
from gammaray.errors import ConfigError, InvalidRequest, NotFound
from gammaray.papers import Papers
from gammaray.routing import registry, revisions
from gammaray.routing.registry import KEPT, Line, Version

V1, V2, V3 = (Version(f"chat-v{n}", "1", "model") for n in (1, 2, 3))
PLAIN = Version(None)


def names(versions: tuple[Version, ...]) -> list[str | None]:
    return [version.drafter for version in versions]


def trial(candidate: Version = V2) -> Line:
    return registry.propose(registry.begin(V1), candidate, 10.0, "configured")


@pytest.mark.parametrize(
    ("papers", "target", "why"),
    [
        (None, "a", ""),  # of a drafter that was made elsewhere
        (Papers("a"), "a", ""),
        (Papers("a"), None, ""),  # not known here
        (
            Papers("a", problem="it has no acceptance report"),
            "a",
            "gammaray train report big --drafter ./out",
        ),
        (Papers("a", problem="it has no acceptance report"), None, "gammaray train report big"),
        (Papers("b"), "a", "gammaray train refresh big --drafter ./out"),
    ],
)
def test_a_version_is_admitted_by_its_papers(papers: Papers | None, target: str | None, why: str) -> None:
    """Else a head that was distilled for other weights, or that nobody measured, could be put on trial."""
    if not why:
        admitted = registry.admit(V2, papers, target, "./out", "big")
        assert trial(admitted).candidate is not None
        return
    with pytest.raises(ConfigError, match=why):
        registry.admit(V2, papers, target, "./out", "big")


def test_a_trial_is_in_the_shadow_then_live_then_current() -> None:
    shadow = trial()
    assert (shadow.current, shadow.live) == (V1, False)
    assert shadow.candidate is not None and shadow.candidate.since == 10.0
    live = registry.accept(shadow, 20.0, "as good")
    assert live.live and live.candidate is not None and live.candidate.since == 20.0
    after = registry.promote(live, 30.0, "as good with real requests")
    assert [(stage, v.drafter) for stage, v in after.stages()] == [
        ("current", "chat-v2"),
        ("previous", "chat-v1"),
    ]
    assert (after.current.since, after.current.reason, after.live) == (
        30.0,
        "as good with real requests",
        False,
    )


def test_a_roll_back_of_a_promotion_gives_what_was_before() -> None:
    before = registry.promote(trial(), 20.0, "")
    after = registry.roll_back(
        registry.promote(registry.propose(before, V3, 30.0, ""), 40.0, ""), 50.0, "KL 0.2"
    )
    assert after.current.identity == before.current.identity
    assert [v.identity for v in after.previous] == [v.identity for v in before.previous]
    assert [(v.drafter, v.reason) for v in after.rejected] == [("chat-v3", "KL 0.2")]


def test_a_rejected_version_is_known_and_may_be_proposed_again() -> None:
    line = registry.reject(trial(), 20.0, "slower")
    assert line.candidate is None and line.knows(V2)
    assert not line.knows(Version("chat-v2", "2", "model")), "another version of the same drafter is new"
    again = registry.propose(line, V2, 30.0, "by the operator")
    assert names(again.rejected) == [] and again.candidate is not None


def test_one_goes_back_to_what_is_on_trial_again() -> None:
    """It is current then, and neither a candidate nor rejected."""
    line = registry.promote(trial(), 20.0, "")
    line = registry.propose(registry.reject(registry.propose(line, V1, 30.0, ""), 40.0, ""), V1, 50.0, "")
    back = registry.roll_back(registry.accept(line, 55.0, ""), 60.0, "")
    assert [(stage, v.drafter) for stage, v in back.stages()] == [
        ("current", "chat-v1"),
        ("rejected", "chat-v2"),
    ]
    assert not back.live
    rejected = registry.reject(registry.propose(registry.promote(trial(), 1.0, ""), V1, 2.0, ""), 3.0, "")
    assert names(registry.roll_back(rejected, 4.0, "").rejected) == ["chat-v2"]


def test_a_previous_version_that_is_promoted_again_is_there_once() -> None:
    line = registry.promote(registry.propose(registry.promote(trial(), 20.0, ""), V1, 30.0, ""), 40.0, "")
    assert (line.current.drafter, names(line.previous)) == ("chat-v1", ["chat-v2"])


def test_a_second_candidate_takes_the_place_of_the_first() -> None:
    line = registry.propose(registry.accept(trial(), 15.0, ""), V3, 20.0, "configured")
    assert line.candidate is not None and line.candidate.drafter == "chat-v3" and not line.live
    assert names(line.rejected) == ["chat-v2"]


def test_what_is_not_there_cannot_be_moved() -> None:
    line = registry.begin(V1)
    for move in (registry.promote, registry.reject, registry.accept):
        with pytest.raises(NotFound, match="no drafter version is on trial"):
            move(line, 1.0, "")
    with pytest.raises(NotFound, match="no previous version"):
        registry.roll_back(line, 1.0, "")
    with pytest.raises(InvalidRequest, match="is the current version already"):
        registry.propose(line, V1, 1.0, "")


def test_the_first_drafter_of_a_class_rolls_back_to_plain_decoding() -> None:
    line = registry.promote(registry.propose(registry.begin(PLAIN), V1, 1.0, ""), 2.0, "")
    assert registry.roll_back(line, 3.0, "").current.drafter is None


def test_a_changed_configuration_wins_and_keeps_the_way_back() -> None:
    promoted = registry.promote(trial(), 20.0, "")
    assert registry.configure(promoted, V1, 25.0) is promoted, "it says what it said"
    followed = registry.configure(promoted, V2, 30.0)
    assert followed.current.drafter == "chat-v2" and names(followed.previous) == ["chat-v1"]
    switched = registry.configure(
        registry.accept(registry.propose(promoted, V1, 25.0, ""), 26.0, ""), V3, 30.0
    )
    assert switched.current.drafter == "chat-v3" and names(switched.previous) == ["chat-v2", "chat-v1"]
    assert switched.candidate is not None and switched.candidate.drafter == "chat-v1" and switched.live
    taken = registry.configure(registry.propose(promoted, V3, 25.0, ""), V3, 30.0)
    assert taken.candidate is None and taken.current.drafter == "chat-v3"


def test_versions_that_can_no_longer_run_are_no_way_back() -> None:
    line = registry.promote(trial(), 20.0, "")
    assert registry.keep(line, {V2.identity}).previous == ()
    assert registry.keep(line, {V1.identity, V2.identity}) == line


Identity = tuple[str | None, str]


class Registry(RuleBasedStateMachine):
    """Beside a model: lists of identities whose last is the newest."""

    @initialize()
    def start(self) -> None:
        self.line, self.now = registry.begin(PLAIN), 0.0
        self.current: list[Identity] = [PLAIN.identity]  # ... is current, behind those before it
        self.rejected: list[Identity] = []
        self.candidate: Identity | None = None

    def tick(self) -> float:
        self.now += 1
        return self.now

    def dismiss(self, identity: Identity) -> None:
        self.rejected = [*(known for known in self.rejected if known != identity), identity][-KEPT:]

    @rule(number=st.integers(0, 3) | st.integers(0, 13))  # few, so that they meet again, or many
    def propose(self, number: int) -> None:
        version = Version(f"d{number // 2}", str(number % 2), "model")
        if version.identity == self.current[-1]:
            with pytest.raises(InvalidRequest):
                registry.propose(self.line, version, self.tick(), "")
            return
        self.line = registry.propose(self.line, version, self.tick(), "")
        if self.candidate not in (None, version.identity):
            self.dismiss(self.candidate)
        self.candidate = version.identity
        self.rejected = [known for known in self.rejected if known != self.candidate]

    @precondition(lambda self: self.candidate)
    @rule()
    def accept(self) -> None:
        self.line = registry.accept(self.line, self.tick(), "")
        assert self.line.live

    @precondition(lambda self: self.candidate)
    @rule()
    def promote(self) -> None:
        before = self.line
        self.line = registry.promote(self.line, self.tick(), "")
        self.current = [known for known in self.current if known != self.candidate] + [self.candidate]
        self.candidate = None
        back = registry.roll_back(self.line, self.now, "")
        assert back.current.identity == before.current.identity
        kept = [v.identity for v in before.previous if v.identity != self.line.current.identity]
        assert [v.identity for v in back.previous] == kept[: KEPT - 1]

    @precondition(lambda self: self.candidate)
    @rule()
    def reject(self) -> None:
        self.line = registry.reject(self.line, self.tick(), "")
        self.dismiss(self.candidate)
        self.candidate = None

    @precondition(lambda self: len(self.current) > 1)
    @rule()
    def roll_back(self) -> None:
        self.line = registry.roll_back(self.line, self.tick(), "")
        self.dismiss(self.current.pop())
        self.rejected = [known for known in self.rejected if known != self.current[-1]]
        self.candidate = None if self.candidate == self.current[-1] else self.candidate

    @invariant()
    def exactly_one_is_current_and_nothing_is_lost(self) -> None:
        self.current = self.current[-KEPT - 1 :]
        assert [stage for stage, _ in self.line.stages()].count("current") == 1
        assert self.line.current.identity == self.current[-1]
        assert [v.identity for v in self.line.previous] == self.current[-2::-1]
        assert [v.identity for v in self.line.rejected] == self.rejected[::-1]
        assert (self.line.candidate.identity if self.line.candidate else None) == self.candidate
        assert self.current[-1] not in (self.candidate, *self.rejected)
        assert len({*self.current}) == len(self.current)


TestRegistry = Registry.TestCase


def tenant(gamma: int, **more: object) -> Tenant:
    return Tenant.model_validate({"drafter": "lookup", "speculation": {"gamma": gamma}, **more})


def test_a_policy_rolls_back_to_the_revision_before_and_touches_nothing_else() -> None:
    code = {"name": "code", "buckets": [{"alpha": (0, 1), "gamma": 2}]}
    first = tenant(4, classes=[code], buckets=[{"alpha": (0, 1), "gamma": 3}])
    second = Tenant.model_validate(
        {
            "drafter": "other",
            "speculation": {"gamma": 7, "tree_width": 2, "enabled": False, "canary": {"drafter": "next"}},
            "classes": [{**code, "buckets": None, "drafter": "other"}, {"name": "new"}],
        }
    )
    kept = revisions.note(
        revisions.note((), revisions.parameters(first), 1.0), revisions.parameters(second), 2.0
    )
    assert [revision.number for revision in kept] == [1, 2]
    assert revisions.note(kept, revisions.parameters(second), 3.0) is kept, "nothing changed"
    kept = revisions.roll_back(kept)
    back = revisions.under(second, kept[-1].parameters)
    assert (back.speculation.gamma, back.speculation.tree_width) == (4, 1)
    assert back.buckets == first.buckets and back.classes[0].buckets == first.classes[0].buckets
    assert not back.speculation.enabled and back.speculation.canary == second.speculation.canary
    assert back.drafter == "other" and back.classes[0].drafter == "other"
    assert back.classes[1] == second.classes[1]
    assert (
        revisions.note(kept, revisions.parameters(back.model_copy(update={"classes": first.classes})), 4.0)
        is kept
    )
    with pytest.raises(NotFound, match="no previous revision"):
        revisions.roll_back(kept)


def test_revisions_are_bounded_and_keep_their_numbers() -> None:
    kept: revisions.Revisions = ()
    for at in range(20):
        kept = revisions.note(kept, revisions.parameters(tenant(1 + at % 16)), float(at))
    assert [revision.number for revision in kept] == list(range(13, 21))
