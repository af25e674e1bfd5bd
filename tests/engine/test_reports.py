"""What a step tells: costs, causes, reuse, shadows and audits. Counts only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from support.decoding import Driver
from support.tape import Letters

from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.quality import MOST_CONTEXT, MOST_ROWS
from gammaray.engine.sequence import TROUBLED_ROUNDS
from gammaray.engine.sim import Language, SimClock, SimDevice, StepCost
from gammaray.engine.sim_drafter import OracleDrafter, constant
from gammaray.errors import ReplicaLost
from gammaray.types import (
    PLAIN,
    Cause,
    Finished,
    GenerateRequest,
    KeyPolicy,
    PolicySnapshot,
    SamplingParams,
    SpeculationPlan,
    StepReport,
)

LANGUAGE = Language(16, max_model_len=2000, seed=3)
COST = StepCost(((1, 0.010), (33, 0.042)))  # 9 ms and 1 ms a token
LEVEL_S = 0.002
KEY = ("default", "default", "sim")


class Lost(OracleDrafter):
    """Answers nothing from some call on, and says why."""

    cause: Cause | None = None

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        return {} if self.cause else super().collect(ticket, deadline)

    def trouble(self, rid: str) -> Cause | None:
        return self.cause


class Rig(Driver):
    def __init__(self, alpha: float = 0.7, blocks: int = 256, cost: StepCost = COST) -> None:
        self.clock = SimClock()
        self.drafter = Lost(LANGUAGE, self.clock, constant(alpha), LEVEL_S, seed=1)
        device = SimDevice(LANGUAGE, self.clock, cost, blocks, 4)
        options = EngineOptions(max_batch=8, token_budget=32, oracle=True)
        model = ModelDrafter(SimDevice(LANGUAGE, SimClock(), StepCost(((10_000, 0.0),)), 256, 4))
        drafters = {"sim": self.drafter, "model": model}
        super().__init__(Engine(device, Letters(), (), drafters, options, self.clock, profile=cost))

    @property
    def finished(self) -> list[Finished]:
        return [ended for report in self.reports for ended in report.finished]


def request(
    name: str = "r", gamma: int = 3, tokens: int = 40, plan: SpeculationPlan | None = None, **changes: object
) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    made = GenerateRequest(name, tuple(range(9)), sampling, plan or SpeculationPlan("sim", gamma))
    return replace(made, **changes)  # type: ignore[arg-type]


def decode(rig: Rig, *requests: GenerateRequest) -> list[Finished]:
    rig.submit(requests)
    rig.finish()
    return rig.finished


def texts(rig: Rig) -> list[list[int]]:
    return [outcome.ids for _, outcome in sorted(rig.outcomes.items())]


# Costs ------------------------------------------------------------------------------------------------


def test_the_marginal_cost_of_a_key_is_its_nodes_and_its_drafting() -> None:
    """Two sequences draft chains of 3, one is plain: 9 tokens are fed, of which 6 are this key's nodes."""
    rig = Rig(alpha=1.0)
    rig.submit([request("a"), request("b"), request("c", plan=PLAIN)])
    for _ in range(3):
        rig.step()
    counts = {part.key: part for part in rig.reports[-1].counts}
    part, plain = counts[KEY], counts["default", "default", None]
    assert part.stats.rounds == 2
    assert part.base_s == pytest.approx(2 * (0.009 + 3 * 0.001))
    assert part.extra_s == pytest.approx(2 * (6 * 0.001 + 3 * LEVEL_S))
    assert (plain.base_s, plain.extra_s) == (0.0, 0.0)


def test_a_drafters_time_is_shared_by_the_keys_that_it_drafts_for() -> None:
    rig = Rig(alpha=1.0)
    rig.submit([request("a"), request("b", tenant="other"), request("c", tenant="other")])
    for _ in range(3):
        rig.step()
    extra = {part.tenant: part.extra_s / part.stats.rounds for part in rig.reports[-1].counts}
    assert extra["default"] == pytest.approx(3 * 0.001 + 3 * LEVEL_S / 3)
    assert extra["other"] == pytest.approx(6 * 0.001 + 3 * LEVEL_S * 2 / 3)


def test_rounds_without_a_draft_count_as_plain_ones() -> None:
    rig = Rig()
    rig.submit([request()])
    rig.step()
    rig.step()
    rig.engine.apply(PolicySnapshot(1, keys={KEY: KeyPolicy("off", epoch=1)}))
    rig.step()
    assert [part.key for part in rig.reports[-2].counts] == [KEY]
    assert [part.key for part in rig.reports[-1].counts] == [("default", "default", None)]


# States -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["off", "pinned_off", "emergency"])
def test_a_key_that_is_off_stops_what_runs_and_its_next_epoch_does_not_bring_it_back(state: str) -> None:
    rig = Rig()
    rig.submit([request(tokens=60)])
    for _ in range(3):
        rig.step()
    rig.engine.apply(PolicySnapshot(1, keys={KEY: KeyPolicy(state, epoch=1)}))  # type: ignore[arg-type]
    rig.step()
    assert rig.reports[-1].verified_nodes == 0
    rig.engine.apply(PolicySnapshot(2, keys={KEY: KeyPolicy("probe", 2, 1, 0.02, epoch=1)}))
    rig.submit([request("new", plan=SpeculationPlan("sim", 2, epoch=1))])
    rig.finish()
    by_name = {ended.request_id: ended for ended in rig.finished}
    assert by_name["r"].stats.drafted == 6  # of the two rounds before
    assert by_name["new"].stats.drafted > 10
    assert {ended.fallback for ended in rig.finished} == {None}  # the controller's own act is none


def test_a_policy_narrows_what_runs() -> None:
    rig = Rig(alpha=1.0)
    rig.engine.apply(PolicySnapshot(1, keys={KEY: KeyPolicy("contract", gamma=2, width=1)}))
    plan = SpeculationPlan("sim", 4, 2)
    decode(rig, request(plan=plan))
    assert max(report.verified_nodes for report in rig.reports) == 2


# Fallbacks --------------------------------------------------------------------------------------------


def test_a_request_breaks_to_plain_at_its_16th_round_and_says_so() -> None:
    rig = Rig(alpha=0.05)
    plan = SpeculationPlan("sim", 4)  # an adaptive one is trimmed to nothing before
    (ended,) = decode(rig, request(plan=plan, tokens=100))
    assert ended.fallback == "low_acceptance"
    drafted = [report.verified_nodes > 0 for report in rig.reports]
    assert drafted == [False] + [True] * 16 + [False] * (len(drafted) - 17)
    expected = Rig()
    decode(expected, request(plan=PLAIN, tokens=100))
    assert texts(rig) == texts(expected)


def test_an_adaptive_request_deepens_what_is_accepted_and_others_do_not() -> None:
    depths = {}
    for adaptive in (False, True):
        rig = Rig(alpha=0.45, cost=StepCost(((1000, 0.100),)))  # drafting is cheap, verifying free
        decode(rig, request(plan=SpeculationPlan("sim", 8, adaptive=adaptive), tokens=200))
        depths[adaptive] = max(report.verified_nodes for report in rig.reports[20:-10])
    assert depths == {False: 8, True: 4}


@pytest.mark.parametrize("cause", ["worker_lost", "timeout"])
def test_a_worker_that_stays_away_is_a_fallback_and_one_that_comes_back_is_none(cause: Cause) -> None:
    for rounds_away, expected in ((TROUBLED_ROUNDS + 30, cause), (TROUBLED_ROUNDS, None)):
        rig = Rig(alpha=0.5)
        rig.submit([request(tokens=60)])
        for _ in range(5):
            rig.step()
        rig.drafter.cause = cause
        for _ in range(rounds_away):
            rig.step()
        if expected is None:
            rig.drafter.cause = None
        rig.finish()
        assert [ended.fallback for ended in rig.finished] == [expected]


def test_only_rounds_in_a_row_are_a_fallback() -> None:
    rig = Rig(alpha=0.5)
    rig.submit([request(tokens=60)])
    for number in range(5 * TROUBLED_ROUNDS):
        rig.drafter.cause = "timeout" if number % TROUBLED_ROUNDS else None
        rig.step()
    rig.engine.apply(PolicySnapshot(1, speculation=False))  # after three of them
    rig.finish()
    assert [ended.fallback for ended in rig.finished] == [None]


def test_a_drafter_that_raised_once_is_forgiven() -> None:
    rig = Rig(alpha=0.5)
    rig.submit([request(tokens=60)])
    rig.step()
    collect = rig.drafter.collect

    def broken(ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        raise RuntimeError("x")

    rig.drafter.collect = broken  # type: ignore[method-assign]
    rig.step()
    rig.drafter.collect = lambda ticket, deadline: {}  # type: ignore[method-assign]
    for _ in range(2 * TROUBLED_ROUNDS):
        rig.step()  # it has nothing to say
    assert rig.engine.scheduler.running[0].fallback is None
    rig.drafter.collect = collect  # type: ignore[method-assign]
    rig.finish()
    assert rig.finished[0].stats.drafted > 0


def test_a_drafter_that_has_nothing_to_say_is_no_fallback() -> None:
    rig = Rig()
    rig.drafter.cause = None
    rig.drafter._ranks = constant(0.7)
    decode(rig, request(plan=SpeculationPlan("model", 3), tokens=10))
    assert rig.finished[0].fallback is None


def test_a_drafter_that_raises_is_a_lost_one_or_out_of_memory() -> None:
    for error, cause in ((RuntimeError("x"), "worker_lost"), (torch.OutOfMemoryError("x"), "oom")):
        rig = Rig()

        def broken(views: Sequence[DraftView], error: Exception = error) -> Ticket:
            raise error

        rig.drafter.begin = broken  # type: ignore[method-assign]
        assert [ended.fallback for ended in decode(rig, request())] == [cause]


def test_what_raises_first_is_the_cause() -> None:
    """Also where a drafter cannot begin a sequence, or fails again as nothing was asked of it."""
    for call in ("catch_up", "begin"):
        rig = Rig()

        def broken(*asked: object) -> None:
            raise torch.OutOfMemoryError("x")

        def unasked(ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
            raise TypeError("x")

        setattr(rig.drafter, call, broken)
        rig.drafter.collect = unasked  # type: ignore[method-assign]
        assert [ended.fallback for ended in decode(rig, request())] == ["oom"]


@pytest.mark.parametrize("call", ["trouble", "take_reuse"])
def test_a_drafter_that_cannot_even_say_what_is_wrong_costs_no_request(call: str) -> None:
    rig = Rig()

    def broken(*asked: object) -> None:
        raise RuntimeError("x")

    rig.drafter.cause = "timeout"
    setattr(rig.drafter, call, broken)
    ended = decode(rig, request("a"), request("b", plan=PLAIN))
    assert [(one.reason, one.preemptions) for one in ended] == [("length", 0)] * 2
    assert sum(report.drafter_failures for report in rig.reports) > 0


def test_no_room_for_a_draft_until_the_end_is_a_fallback() -> None:
    rig = Rig()
    rig.engine.scheduler._fit_tree = lambda *shape: (0, 1)  # type: ignore[method-assign]
    decode(rig, request(tokens=40))
    assert [ended.fallback for ended in rig.finished] == ["kv"]


# Finished sequences -----------------------------------------------------------------------------------


def test_times_of_a_request_are_those_of_the_clock() -> None:
    cost = StepCost(((64, 0.010),))
    rig = Rig(cost=cost)
    rig.submit([request(f"{i}", plan=PLAIN, tokens=5) for i in range(9)])  # 8 run at once
    rig.finish()
    first, last = rig.finished[0], rig.finished[-1]
    assert (first.queued_s, first.first_s) == (0.0, pytest.approx(0.010))
    assert first.per_token_s == pytest.approx(0.010)
    assert last.queued_s > 0.04
    assert last.total_s - last.first_s == pytest.approx(0.040)


def test_the_report_of_a_sequence_is_its_own() -> None:
    rig = Rig()
    ended = decode(rig, request("a", tokens=7), request("b", plan=PLAIN, request_class="long", tokens=3))
    by_name = {one.request_id: one for one in ended}
    assert by_name["a"].key == KEY
    assert by_name["b"].key == ("default", "long", None)
    assert (by_name["a"].output_tokens, by_name["b"].output_tokens) == (7, 3)
    assert by_name["a"].prompt_tokens == 9
    stats = rig.outcomes["a", 0].stats
    assert by_name["a"].stats == stats
    assert stats is not None
    assert sum(stats.level_tested) == stats.tested
    assert sum(stats.level_first) == stats.first_accepted
    assert sum(stats.ranks) == sum(stats.level_accepted)


def test_a_report_says_what_the_client_was_told() -> None:
    """Of tokens that a stop string cuts, and of one that is found as the text ends."""
    plain = Rig()
    decode(plain, request(plan=PLAIN, tokens=12))
    word = "".join(map(Letters().decode, [plain.outcomes["r", 0].ids[3:6]]))
    rig = Rig()
    (ended,) = decode(
        rig, request(sampling=SamplingParams(0.0, max_tokens=12, ignore_eos=True, stop=(word,)))
    )
    outcome = rig.outcomes["r", 0]
    assert (ended.reason, ended.output_tokens) == (outcome.finish, len(outcome.ids)) == ("stop", 3)


def test_a_step_report_of_traced_requests() -> None:
    rig = Rig(alpha=1.0)
    decode(rig, request("a", trace="00-1-2-01", tokens=9), request("b", tokens=9))
    traced = [part for report in rig.reports for part in report.traced]
    assert {part.request_id for part in traced} == {"a"}
    assert [part.phase for part in traced] == ["prefill", "decode", "decode"]
    assert [(part.drafted, part.accepted, part.emitted) for part in traced] == [
        (0, 0, 1),
        (3, 3, 4),
        (3, 3, 4),
    ]


# Reuse ------------------------------------------------------------------------------------------------


def test_reuse_counts_what_was_kept_of_what_was_seen() -> None:
    rig = Rig(blocks=16)
    prompt = tuple(range(13))

    def reuse(reports: Sequence[StepReport]) -> tuple[int, int]:
        seen = sum(report.target_reuse.seen for report in reports)
        return seen, sum(report.target_reuse.reused for report in reports)

    decode(rig, request("a", prompt=prompt, plan=PLAIN, tokens=2))
    assert reuse(rig.reports) == (0, 0)
    at = len(rig.reports)
    decode(rig, request("b", prompt=prompt, plan=PLAIN, tokens=2))
    assert reuse(rig.reports[at:]) == (12, 12)
    at = len(rig.reports)
    decode(
        rig, request("c", prompt=tuple(i * 7 % 16 for i in range(50)), plan=PLAIN, tokens=8)
    )  # pushes it out
    assert reuse(rig.reports[at:]) == (0, 0)
    at = len(rig.reports)
    decode(rig, request("d", prompt=prompt, plan=PLAIN, tokens=2))
    seen, reused = reuse(rig.reports[at:])
    assert seen == 12 and reused < 12


def test_what_is_in_use_all_the_time_is_never_forgotten() -> None:
    """More was reused than had been seen, once enough else had come and gone."""
    rig = Rig(blocks=16)
    shared = tuple(range(12))
    for number in range(120):
        own = tuple((number * 7 + i * (1 + number % 5)) % 16 for i in range(13))
        decode(rig, request(f"{number}", prompt=shared + own, plan=PLAIN, tokens=2))
    assert all(report.target_reuse.reused <= report.target_reuse.seen for report in rig.reports)
    decode(rig, request("large", prompt=tuple(i * 7 % 16 for i in range(55)), plan=PLAIN, tokens=8))
    at = len(rig.reports)
    decode(rig, request("again", prompt=(*shared, 0), plan=PLAIN, tokens=2))
    again = rig.reports[at].target_reuse
    assert again.seen == 12 and again.reused < 12


def test_a_drafters_own_cache_counts_apart() -> None:
    rig = Rig()
    prompt = tuple(range(13))
    for name in "ab":
        decode(rig, request(name, prompt=prompt, plan=SpeculationPlan("model", 2), tokens=20))
    assert sum(report.draft_reuse.seen for report in rig.reports) == 12
    assert sum(report.draft_reuse.reused for report in rig.reports) == 12


# Shadows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shadow_emits_what_plain_decoding_does_and_counts_what_would_have_been(
    width: int, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=4, max_tokens=50, ignore_eos=True)
    shadow = SpeculationPlan("sim", 3, width, verification="rejection", shadow=True, state="shadow")
    rig, plain = Rig(alpha=1.0), Rig()
    (ended,) = decode(rig, request(plan=shadow, sampling=sampling))
    decode(plain, request(plan=PLAIN, sampling=sampling))
    assert texts(rig) == texts(plain)
    told = rig.outcomes["r", 0].stats
    assert told is not None and (told.drafted, told.rounds, told.emitted) == (0, 49, 49)
    assert ended.shadow and ended.fallback is None
    assert ended.stats.alpha == 1.0
    assert ended.stats.tau == pytest.approx(4, abs=0.3)  # the last rounds may draft less
    assert ended.stats.emitted == 48  # each token once, as were it no shadow; the last one needs no draft
    counts = [part for report in rig.reports for part in report.counts if part.key == KEY]
    assert sum(part.stats.emitted for part in counts) == 48
    assert sum(part.stats.drafted for part in counts) == 12 * 3 * width  # and not at every token


# Audits -----------------------------------------------------------------------------------------------


def test_an_audit_of_a_right_engine_finds_no_divergence() -> None:
    rig = Rig()
    rig.engine.apply(PolicySnapshot(1, audit=frozenset({KEY})))
    decode(rig, request("a"), request("b"), request("c", tenant="other"))
    decode(rig, request("d", tokens=100))
    audited = {ended.request_id: ended.quality for ended in rig.finished if ended.quality}
    assert set(audited) == {"a", "d"}  # one at a time, and of this key only
    assert (audited["a"].tokens, audited["d"].tokens) == (40, 64)
    assert all(quality.kl < 1e-6 for quality in audited.values())
    ids = rig.outcomes["a", 0].ids
    logits = rig.engine.runner.dense([*range(9), *ids])[0].double().log_softmax(-1)
    likelihood = logits[8:-1].gather(1, torch.tensor(ids)[:, None]).mean()
    assert audited["a"].perplexity == pytest.approx(float(torch.exp(-likelihood)))


def test_an_audit_finds_logits_that_are_not_the_models() -> None:
    rig = Rig()
    inner = rig.engine.runner.forward
    rig.engine.runner.forward = lambda rows: inner(rows) * 1.2  # type: ignore[method-assign]
    rig.engine._oracle = None
    rig.engine.apply(PolicySnapshot(1, audit=frozenset({KEY})))
    (ended,) = decode(rig, request())
    assert ended.quality is not None and ended.quality.kl > 0.005


def test_an_audit_that_fails_costs_no_request() -> None:
    rig = Rig()
    rig.engine._oracle = None

    def broken(tokens: Sequence[int]) -> None:
        raise torch.OutOfMemoryError("x")

    rig.engine.runner.dense = broken  # type: ignore[method-assign, assignment]
    rig.engine.apply(PolicySnapshot(1, audit=frozenset({KEY})))
    ended = decode(rig, request("a", tokens=5), request("b"))
    assert [(one.reason, one.quality) for one in ended] == [("length", None)] * 2


def test_a_target_that_is_lost_in_an_audit_is_lost() -> None:
    """Its requests go on elsewhere; they do not fail."""
    rig = Rig()
    rig.engine._oracle = None

    def lost(tokens: Sequence[int]) -> None:
        raise ReplicaLost("x")

    rig.engine.runner.dense = lost  # type: ignore[method-assign, assignment]
    rig.engine.apply(PolicySnapshot(1, audit=frozenset({KEY})))
    with pytest.raises(ReplicaLost):
        decode(rig, request("a", tokens=5), request("b"))


def test_sequences_that_end_early_are_not_audited_and_leave_the_place_to_others() -> None:
    rig = Rig()
    rig.engine.apply(PolicySnapshot(1, audit=frozenset({KEY})))
    rig.submit([request("a")])
    for _ in range(4):
        rig.step()
    rig.engine.abort("a")
    decode(rig, request("b"), request("long", prompt=(1,) * (MOST_CONTEXT - MOST_ROWS + 1)))
    assert {one.request_id: one.quality is not None for one in rig.finished} == {
        "a": False,
        "b": True,
        "long": False,
    }


def test_an_audit_goes_on_over_a_preemption() -> None:
    rig = Rig()
    rig.engine.apply(PolicySnapshot(1, audit=frozenset({KEY})))
    rig.submit([request()])
    for _ in range(4):
        rig.step()
    (sequence,) = rig.engine.scheduler.running
    rig.engine.scheduler._preempt(sequence)
    rig.engine._release_draft(sequence)
    rig.finish()
    (ended,) = rig.finished
    assert ended.preemptions == 1
    assert ended.quality is not None and ended.quality.tokens == 40 and ended.quality.kl < 1e-6
