"""What real speculative servers got wrong, by the number of the case; each stands for a kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.checkpoint import save_checkpoint
from support.decoding import Cycles, Driver, Foresight, Outcome, run
from support.tape import Letters, TapeRunner

from gammaray.config import parse
from gammaray.engine.build import build_engine
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.errors import InvalidRequest, VocabularyMismatch
from gammaray.types import (
    PLAIN,
    GenerateRequest,
    Grammar,
    PolicySnapshot,
    SamplingParams,
    SpeculationPlan,
)

PROMPT = (1, 2, 3)
CHAIN = SpeculationPlan("oracle", 6, 1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


class Scripted(TapeRunner):
    """Says the script, whatever came before; its KV is checked as ever."""

    def __init__(self, script: Sequence[int], vocab: int = 128) -> None:
        super().__init__(vocab, blocks=64, max_model_len=128)
        self.script = script

    def _logits(self, context: tuple[int, ...]) -> np.ndarray:
        logits = super()._logits(context).copy()
        logits[self.script[len(context) % len(self.script)]] += 20
        return logits


class Words:
    """Token i is a word of its own."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[i] for i in ids)


def scripted(output: Sequence[int], eos: Sequence[int] = (), decoder: object = None) -> Engine:
    """An engine that says `output` behind PROMPT, and whose drafter foresees it."""
    script = [*PROMPT, *output, *range(100, 128)]
    drafters = {"oracle": Foresight(script), "ngram": NgramDrafter(3, 1)}
    options = EngineOptions(oracle=True)
    return Engine(Scripted(script), decoder or Letters(), eos, drafters, options)  # type: ignore[arg-type]


def ask(
    sampling: SamplingParams = GREEDY, plan: SpeculationPlan = CHAIN, **changes: object
) -> GenerateRequest:
    return replace(GenerateRequest("r", PROMPT, sampling, plan), **changes)  # type: ignore[arg-type]


def only(engine: Engine, request: GenerateRequest) -> Outcome:
    (outcome,) = run(engine, [request]).values()
    return outcome


def tape(**options: int) -> Engine:
    """A random language, and a drafter that knows it fairly well."""
    return Engine(
        TapeRunner(8, blocks=64, max_model_len=96),
        Letters(),
        [7],
        {"good": ModelDrafter(TapeRunner(8, 96, 4, 96, noise=0.3)), "ngram": NgramDrafter(3, 1)},
        EngineOptions(oracle=True, **options),  # type: ignore[arg-type]
        grammars=Cycles(8, 7),  # type: ignore[arg-type]
    )


def test_b1_greedy_ngram_output_is_plain_output() -> None:
    for first in range(7):
        asked = ask(replace(GREEDY, ignore_eos=True), prompt=(first, 2, 3, first, 2))
        found = only(tape(), replace(asked, plan=SpeculationPlan("ngram", 4, 1)))
        assert found.ids == only(tape(), replace(asked, plan=PLAIN)).ids


def test_b2_a_stop_token_inside_the_block_wins_over_max_tokens() -> None:
    stop = 50
    engine = scripted([9, 10, 11, stop, 20, 21, 22])
    found = only(engine, ask(replace(GREEDY, max_tokens=6, stop_token_ids=(stop,))))
    assert (found.finish, found.ids) == ("stop", [9, 10, 11, stop])
    assert found.stats is not None and found.stats.rounds == 1, "the block came in one round"


def test_b3_a_stop_string_early_in_a_long_accepted_run_is_found() -> None:
    words = [chr(i) for i in range(128)]
    text = "x, one two END three four five six"
    engine = scripted([ord(c) for c in text], decoder=Words(*words))
    found = only(engine, ask(replace(GREEDY, max_tokens=30, stop=("END",)), SpeculationPlan("oracle", 30, 1)))
    assert (found.text, found.finish) == ("x, one two ", "stop")
    assert found.stats is not None and found.stats.rounds == 1


def test_b4_text_ids_and_logprobs_are_trimmed_together() -> None:
    words = Words(*["."] * 10, " ha", " ho", *["."] * 116)
    engine = scripted([11, 11, 10, 10, 10, 11], decoder=words)
    found = only(engine, ask(replace(GREEDY, stop=(" ha ha ha",), logprobs=2)))
    assert (found.text, found.ids, found.finish) == (" ho ho", [11, 11], "stop")
    assert [len(entry.top) for entry in found.logprobs] == [2, 2]


@pytest.mark.parametrize("limit", range(1, 9))
def test_b6_max_tokens_is_exact_and_the_first_token_counts(limit: int) -> None:
    output = [20, 21, 22, 23, 24, 25, 26, 27, 28]
    found = only(scripted(output), ask(replace(GREEDY, max_tokens=limit)))
    assert (found.ids, found.finish) == (output[:limit], "length")
    assert only(scripted(output, eos=[20]), ask()).ids == [20], "the prefill's token is stop-checked too"


def test_b8_every_drafted_token_has_the_targets_log_probability() -> None:
    asked = ask(replace(GREEDY, logprobs=0, ignore_eos=True), SpeculationPlan("good", 4, 1))
    engine = tape()
    found = only(engine, asked)
    logits, _ = engine.runner.dense([*PROMPT, *found.ids])
    raw = logits.log_softmax(-1)
    expected = [float(raw[len(PROMPT) - 1 + i, token]) for i, token in enumerate(found.ids)]
    assert found.stats is not None and found.stats.accepted > 4
    assert [entry.logprob for entry in found.logprobs] == pytest.approx(expected, abs=1e-5)
    assert max(expected) < 0


def test_b10_a_seed_gives_one_text_whatever_ran_before_or_beside_it() -> None:
    asked = ask(SamplingParams(seed=5, max_tokens=20, ignore_eos=True), SpeculationPlan("good", 4, 2))
    alone = only(tape(), asked).ids
    engine = tape()
    others = [
        replace(asked, request_id=str(i), sampling=replace(asked.sampling, seed=i)) for i in range(9, 14)
    ]
    run(engine, others)
    again = [replace(other, request_id=other.request_id + "'") for other in others]
    assert run(engine, [*again, asked])["r", 0].ids == alone


def test_b12_rows_of_a_mixed_batch_equal_solo_runs() -> None:
    plans = [
        PLAIN,
        SpeculationPlan("good", 4, 1),
        SpeculationPlan("ngram", 3, 1),
        SpeculationPlan("good", 2, 3),
    ]
    batch = [
        ask(SamplingParams(seed=i, max_tokens=20), plans[i % 4], request_id=str(i), prompt=(i % 7, 2, 3, 2))
        for i in range(8)
    ]
    together = run(tape(), batch)
    for asked in batch:
        solo = only(tape(), replace(asked, plan=PLAIN))
        assert (together[asked.request_id, 0].ids, together[asked.request_id, 0].text) == (
            solo.ids,
            solo.text,
        )


@pytest.mark.parametrize(
    "one",
    [
        {"min_p": 0.2},
        {"logit_bias": ((2, -100.0), (5, 3.0))},
        {"bad_words": ((2,), (5, 1))},
        {"min_tokens": 15},
    ],
)
def test_b14_parameters_hold_at_every_verified_position(one: dict[str, object]) -> None:
    accepted = 0
    for seed in range(8):
        asked = ask(SamplingParams(seed=seed, max_tokens=20, **one), SpeculationPlan("good", 4, 2))  # type: ignore[arg-type]
        found, plain = only(tape(), asked), only(tape(), replace(asked, plan=PLAIN))
        assert found.ids == plain.ids
        accepted += found.stats.accepted if found.stats else 0
        if "logit_bias" in one:
            assert 2 not in found.ids
        if "bad_words" in one:
            assert 2 not in found.ids and (5, 1) not in list(zip(found.ids, found.ids[1:], strict=False))
        if "min_tokens" in one:
            assert len(found.ids) >= 15
    assert accepted > 8


def test_b15_a_grammar_holds_from_the_next_token_inside_an_accepted_block() -> None:
    sampling = replace(GREEDY, grammar=Grammar("regex", "0123"), logit_bias=((7, -100.0),))
    asked = ask(sampling, SpeculationPlan("ngram", 4, 1), prompt=(0, 1, 2, 3, 0, 1, 2, 3, 0, 1))
    found = only(tape(), asked)
    assert found.ids == [0, 1, 2, 3] * 6
    assert found.stats is not None and found.stats.accepted > 3


def test_b17_only_committed_tokens_count_as_accepted() -> None:
    eos = 103
    engine = scripted([100, 101, 102, eos, 104, 105, 106], eos=[eos])
    found = only(engine, ask())
    assert found.ids == [100, 101, 102, eos]
    assert found.stats is not None
    assert (found.stats.rounds, found.stats.tau, found.stats.accepted) == (1, 3.0, 3)


@pytest.mark.parametrize("prompt", [90, 94, 95])
def test_b18_a_prompt_close_to_the_end_of_target_and_drafter(prompt: int) -> None:
    engine = tape()
    engine.drafters["good"].inner = ModelDrafter(TapeRunner(8, 96, 4, max_model_len=32, noise=0.3))
    asked = ask(replace(GREEDY, max_tokens=96 - prompt, ignore_eos=True), SpeculationPlan("good", 6, 2))
    found = only(engine, replace(asked, prompt=tuple(i % 7 for i in range(prompt))))
    assert (found.finish, len(found.ids)) == ("length", 96 - prompt)


def test_b19_an_abort_in_the_middle_frees_every_block() -> None:
    engine = tape()
    driver = Driver(engine)
    driver.submit([ask(replace(GREEDY, ignore_eos=True), SpeculationPlan("good", 6, 3), n=2)])
    for _ in range(3):
        driver.step()
    engine.abort("r")
    driver.finish()
    assert driver.outcomes["r", 0].finish == "abort"
    drafter = engine.drafters["good"].inner
    assert isinstance(drafter, ModelDrafter)
    assert engine.cache.pool.used == drafter.cache.pool.used == 0


def test_b21_acceptance_recovers_when_speculation_comes_back() -> None:
    """The perfect drafter accepts everything, unless its KV missed what was decoded without it."""
    engine = tape()
    engine.drafters["good"].inner = ModelDrafter(TapeRunner(8, 96, 4, 96))
    driver = Driver(engine)
    driver.submit([ask(replace(GREEDY, max_tokens=60, ignore_eos=True), SpeculationPlan("good", 4, 1))])
    for speculation in (True, False, True):
        engine.apply(PolicySnapshot(speculation=speculation))
        for _ in range(4):
            driver.step()
    report = driver.reports[-1].counts[0].stats
    assert (report.drafted, report.accepted, report.emitted) == (4, 4, 5)


def test_b23_different_vocabularies_stop_the_start(tmp_path: Path) -> None:
    target, other = save_checkpoint(tmp_path / "target"), save_checkpoint(tmp_path / "other", extra=3)
    config = parse(
        {"target": {"model": target}, "drafters": {"d": {"method": "model", "model": other}}}, "test"
    )
    with pytest.raises(VocabularyMismatch, match=r"260.*257|257.*260"):
        build_engine(config)


def test_several_sequences_of_one_request_speculate_and_differ() -> None:
    asked = ask(SamplingParams(seed=1, max_tokens=16), SpeculationPlan("good", 4, 2), n=4)
    found = run(tape(), [asked])
    assert found.keys() == {("r", i) for i in range(4)}
    assert len({tuple(outcome.ids) for outcome in found.values()}) > 1
    assert {key: o.ids for key, o in run(tape(), [replace(asked, plan=PLAIN)]).items()} == {
        key: o.ids for key, o in found.items()
    }


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        tape().submit(ask(prompt=()))
