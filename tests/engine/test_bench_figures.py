"""The figures of `gammaray bench engine`, from runs whose times are made up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.checkpoint import byte_tokenizer

from gammaray.drafter_names import Arm
from gammaray.engine.bench.dataset import Prompt
from gammaray.engine.bench.figures import ALL, interval, rows
from gammaray.engine.bench.measure import Measured, Skipped, measure
from gammaray.engine.bench.report import Report
from gammaray.engine.local import Run
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan, SpeculationStats


def ran(tokens: int, seconds: float, ids: Sequence[int] = (), **counts: int) -> Run:
    return Run(tuple(ids or range(tokens)), "", 9.0, seconds, SpeculationStats(**counts))


def measured(category: str, plain: Run, run: Run) -> Measured:
    return Measured(Prompt(f"{category}-1", category, "x"), plain, {"d": run})


FAST = measured("code", ran(11, 2.0), ran(11, 0.5, rounds=4, emitted=10, tested=4, first_accepted=3))
SLOW = measured("chat", ran(41, 4.0), ran(41, 5.0, rounds=40, emitted=40, tested=36, first_accepted=0))


def test_a_category_is_the_ratio_of_total_times_and_not_the_mean_of_ratios() -> None:
    """Nor does the first token's time count, nor alpha average over prompts."""
    total, code, chat = rows("d", [FAST, SLOW])
    assert (total.category, code.category, chat.category) == (ALL, "code", "chat")
    assert (code.speedup, chat.speedup, total.speedup) == (4.0, 0.8, pytest.approx(6.0 / 5.5))
    assert (total.tok_s, total.plain_tok_s) == (50 / 5.5, 50 / 6)
    assert (total.tau, total.alpha) == (50 / 44, 3 / 40)
    assert (total.prompts, total.equal, total.tokens, total.rounds) == (2, 2, 52, 44)


def test_an_interval_is_over_prompts() -> None:
    plain, runs = [ran(11, 2.0), ran(41, 4.0)] * 10, [ran(11, 0.5), ran(41, 5.0)] * 10
    low, high = interval(plain, runs)
    assert low is not None and high is not None
    assert 0.8 < low < 6.0 / 5.5 < high < 4.0
    assert interval(plain, runs) == (low, high)  # seeded
    alike = interval(plain, [ran(len(one.ids), one.decode_s / 2) for one in plain])
    assert alike == pytest.approx((2.0, 2.0))


def test_what_cannot_be_measured_is_nothing_and_not_zero() -> None:
    """An answer of one token has no second to time; one prompt has no interval."""
    single = measured("stop", ran(1, 0.0), ran(1, 0.0))
    (total, _) = rows("d", [single])
    assert (total.tok_s, total.speedup, total.tau, total.alpha) == (None, None, None, None)
    assert rows("d", [FAST])[0].speedup_ci == (None, None)
    assert rows("d", [FAST, single])[0].speedup == 4.0
    together = measured("held", ran(2, 0.0), ran(2, 0.0))  # text that was held back
    assert (together.plain.tok_s, rows("d", [FAST, together])[0].tok_s) == (None, 20.0)


def test_a_difference_in_float32_is_a_finding_and_elsewhere_a_figure() -> None:
    wrong = measured("code", ran(3, 1.0), ran(3, 1.0, ids=(0, 7, 2)))
    report = Report({}, ["d"], "float32", [wrong, SLOW], [Skipped("long", "too long", failed=False)])
    assert report.failed == ["d: code-1 differs from plain decoding in float32"]
    assert report.rows[0].equal == 1
    assert Report({}, ["d"], "bfloat16", [wrong]).failed == []
    assert Report({}, ["d"], "bfloat16", [], [Skipped("p", "broken", failed=True)]).failed == ["p: broken"]


def test_each_arm_begins_in_its_turn_and_answers_each_prompt_once() -> None:
    """Who always came first would find cold caches; the warm-up may be of no prompt that is measured."""
    asked: list[GenerateRequest] = []

    def run(engine: object, request: GenerateRequest) -> Run:
        asked.append(request)
        return ran(2, 1.0)

    prompts = [Prompt(f"p{i}", "c", f"text {i}") for i in range(3)]
    arms = [Arm("a", "ngram", 4, 1), Arm("b", "ngram", 2, 3)]
    found = list(measure(None, byte_tokenizer(), arms, prompts, SamplingParams(), True, run))
    labels = [request.request_id for request in asked]
    assert labels[:3] == ["warm-up"] * 3
    assert labels[3:] == [*("0 plain", "0 a", "0 b"), *("1 a", "1 b", "1 plain"), *("2 b", "2 plain", "2 a")]
    assert [one.prompt for one in found if isinstance(one, Measured)] == prompts
    shapes = {request.request_id[2:]: request.plan for request in asked[3:]}
    assert shapes["plain"] == PLAIN
    assert shapes["b"] == SpeculationPlan("ngram", 2, 3, adaptive=True)
    measured_prompts = {request.prompt for request in asked[3:]}
    assert len(measured_prompts) == 3 and not measured_prompts & {request.prompt for request in asked[:3]}
