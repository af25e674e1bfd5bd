"""From configuration to engine, and the chain check, on checkpoints written to disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.checkpoint import save_checkpoint
from support.decoding import run

from gammaray.config import Config, parse
from gammaray.engine.build import _continued, build_engine
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.loading import load_runner
from gammaray.engine.local import Run, compare
from gammaray.engine.validate import validate
from gammaray.errors import ConfigError, VocabularyMismatch
from gammaray.types import GenerateRequest, SamplingParams, SpeculationPlan, SpeculationStats

PROMPT = tuple(b"one two three one two three one")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    save_checkpoint(root / "target", layers=3)
    save_checkpoint(root / "small", layers=1)
    save_checkpoint(root / "larger-vocabulary", extra=3)
    save_checkpoint(root / "other-vocabulary", swap=True)
    return root


def config(folder: Path, drafter: str = "small", **target: object) -> Config:
    kv = {"num_blocks": 64}
    return parse(
        {
            "target": {"model": str(folder / "target"), "dtype": "float32", "kv": kv, **target},
            "drafters": {
                "lookup": {"method": "ngram"},
                "small": {"method": "model", "model": str(folder / drafter), "dtype": "float32"},
            },
            "tenants": {"default": {"drafter": "lookup"}},
        },
        "test",
    )


def test_an_engine_is_built_with_all_its_drafters(folder: Path) -> None:
    engine = build_engine(config(folder), oracle=True)
    assert engine.info.drafters == ("lookup", "small")
    assert engine.info.vocab_size == 257
    assert engine.info.max_model_len == 256
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    plans = [SpeculationPlan("lookup", 4), SpeculationPlan("small", 3, 2), SpeculationPlan()]
    outcomes = run(engine, [GenerateRequest(str(i), PROMPT, sampling, plan) for i, plan in enumerate(plans)])
    assert len({tuple(outcome.ids) for outcome in outcomes.values()}) == 1


class Elsewhere(ModelDrafter):
    """Stands for a pool of draft workers; knows who began with it."""

    def __init__(self, vocab_size: int, folder: Path) -> None:
        super().__init__(load_runner(str(folder / "small"), "float32", num_blocks=32))
        assert vocab_size == self.vocab_size
        self.salts: set[bytes] = set()

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        self.salts.add(salt)
        super().catch_up(rid, tokens, salt)


@pytest.mark.parametrize("shared", [False, True], ids=["only elsewhere", "also here"])
def test_a_tenant_with_a_pool_drafts_there_and_others_here(folder: Path, shared: bool) -> None:
    settings = config(folder)
    tenants = {"bank": {"drafter": "small"}, "shop": {"drafter": "small" if shared else "lookup"}}
    settings = parse({**settings.model_dump(), "tenants": tenants}, "test")
    made: list[Elsewhere] = []

    def reach(size: int) -> Elsewhere:
        made.append(Elsewhere(size, folder))
        return made[-1]

    engine = build_engine(settings, pools={("bank", "small"): reach})
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plan = SpeculationPlan("small", 3)
    outcomes = run(
        engine,
        [GenerateRequest(tenant, PROMPT, sampling, plan, tenant=tenant) for tenant in ("bank", "shop")],
    )
    assert [elsewhere.salts for elsewhere in made] == [{b"bank"}]
    drafted = [outcomes[tenant, 0].stats.drafted > 0 for tenant in ("bank", "shop")]  # type: ignore[union-attr]
    assert drafted == [True, shared]
    assert outcomes["bank", 0].ids == outcomes["shop", 0].ids


def test_a_comparison_reports_equality_and_rates(folder: Path) -> None:
    engine = build_engine(config(folder))
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    comparison = compare(
        engine, GenerateRequest("r", PROMPT, sampling), SpeculationPlan("small", 2), repeats=1
    )
    report = comparison.to_json()
    assert report["equal"] is True
    assert report["first_difference"] is None
    assert report["plain"]["tokens"] == report["speculative"]["tokens"] == 40
    assert report["speedup"] == pytest.approx(report["speculative"]["tok_s"] / report["plain"]["tok_s"])


def test_vocabularies_of_two_sizes_do_not_start_and_both_sizes_are_named(folder: Path) -> None:
    """sglang#24051: garbage without a word."""
    with pytest.raises(VocabularyMismatch, match=r"'small'.*260 tokens.*257"):
        build_engine(config(folder, "larger-vocabulary"))


def test_vocabularies_of_one_size_with_other_tokens_do_not_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match="other tokens in it"):
        build_engine(config(folder, "other-vocabulary"))


def test_a_valid_chain_passes_every_check(folder: Path) -> None:
    checks = list(validate(config(folder), determinism=True))
    assert [check.name for check in checks if not check.ok] == []
    names = [check.name for check in checks]
    assert names == [
        "target", "paged attention", "KV layout", "drafter lookup", "drafter small", "scheduler",
        "on/off lookup", "on/off small",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "drafter, target, failed",
    [
        ("larger-vocabulary", {}, "drafter small"),
        ("small", {"kv": {"num_blocks": 4}}, "KV layout"),
        ("small", {"token_budget": 8}, "scheduler"),
        ("small", {"model": "no/such-folder"}, "target"),
    ],
)
def test_a_broken_link_is_named(folder: Path, drafter: str, target: dict[str, object], failed: str) -> None:
    checks = list(validate(config(folder, drafter, **target)))
    assert [check.name for check in checks if not check.ok] == [failed]


def test_a_rate_counts_the_tokens_after_the_first() -> None:
    assert Run((1, 2, 3), "", ttft_s=9.0, decode_s=0.5, stats=SpeculationStats()).tok_s == 4.0
    assert Run((1,), "", ttft_s=9.0, decode_s=0.0, stats=SpeculationStats()).tok_s is None


def test_a_tenant_that_no_request_can_reach_is_a_finding(folder: Path) -> None:
    settings = config(folder)
    tenants = {**settings.model_dump()["tenants"], "other": {}}
    checks = list(validate(parse({**settings.model_dump(), "tenants": tenants}, "test")))
    assert [(check.name, check.detail[:6]) for check in checks if not check.ok] == [("tenants", "other:")]


def test_a_pool_that_does_not_fit_into_memory_is_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no memory for a KV pool of 10000000000000 blocks"):
        build_engine(config(folder, kv={"num_blocks": 10**13}))


def test_an_engine_is_asynchronous_if_its_configuration_says_so(folder: Path) -> None:
    assert build_engine(config(folder, asynchronous=True)).options.asynchronous
    assert not build_engine(config(folder)).options.asynchronous


def test_recorded_passes_leave_what_any_drafter_continues() -> None:
    heads = [SimpleNamespace(layers=(3, 1)), NgramDrafter(), SimpleNamespace(layers=(1, 0))]
    assert _continued(heads) == [0, 1, 3]  # type: ignore[arg-type]


def test_a_folder_that_is_not_there_is_called_so() -> None:
    with pytest.raises(ConfigError, match="no such file or folder: /no/such/model"):
        load_runner("/no/such/model")


@pytest.mark.parametrize(("ranks", "ok"), [(2, True), (3, False)])
def test_the_check_knows_which_tensor_parallel_sizes_fit(folder: Path, ranks: int, ok: bool) -> None:
    checks = {check.name: check for check in validate(config(folder, tensor_parallel=ranks))}
    assert checks["tensor parallel"].ok == ok
    assert ok or "tensor_parallel 3 does not divide" in checks["tensor parallel"].detail
