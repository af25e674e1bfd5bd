"""target.deterministic: a request has the same bits in every company, with every draft, in 16 bits too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoint import save_checkpoint
from support.decoding import Driver, run
from support.embedded import MODEL, needs_embedded
from support.identity import COMPANIES, engine, outcomes, same_bits, with_pool, workload
from support.tape import Letters
from tiny import tiny_llama, tiny_model
from transformers import Gemma2Config, GPT2Config, LlamaConfig, MistralConfig, MixtralConfig, Qwen3Config

from gammaray.config import parse
from gammaray.engine import invariance, linear, selfcheck
from gammaray.engine.attention import DenseAttention
from gammaray.engine.batch import Row
from gammaray.engine.build import TokenizerDecoder, build_engine
from gammaray.engine.hf import HuggingFaceModel
from gammaray.engine.lean import LeanModel
from gammaray.engine.loading import load_runner, load_tokenizer
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ModelUnsupported
from gammaray.kernels import api, cpu, paths
from gammaray.kernels.invariant import Sizes
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan

VOCAB = 12
DTYPES = ("float32", "bfloat16")


def load(dtype: str, deterministic: bool = True, **cfg: Any) -> ModelRunner:
    model = tiny_llama(VOCAB, layers=3, **cfg)
    return load_runner(model, dtype, num_blocks=8, max_model_len=160, deterministic=deterministic)


@pytest.fixture(scope="module")
def runners() -> dict[str, ModelRunner]:
    small = load_runner(tiny_llama(VOCAB, layers=1, seed=5), "bfloat16", num_blocks=160, max_model_len=160)
    return {"small": small, **{dtype: load(dtype) for dtype in DTYPES}}


requests = st.lists(
    st.builds(
        GenerateRequest,
        request_id=st.just("?"),
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=70).map(tuple),
        sampling=st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 1.0]),
            top_p=st.sampled_from([1.0, 0.9]),
            seed=st.integers(0, 2**63),
            max_tokens=st.integers(1, 30),
            logprobs=st.just(3),
        ),
        plan=st.builds(
            SpeculationPlan,
            drafter=st.sampled_from(["ngram", "guesser", "small"]),
            gamma=st.integers(1, 7),
            width=st.integers(1, 4),
        ),
    ),
    min_size=1,
    max_size=6,
).map(lambda batch: [replace(request, request_id=str(i)) for i, request in enumerate(batch)])
companies = st.fixed_dictionaries(
    {
        "max_batch": st.integers(1, 6),
        "budget": st.sampled_from([8, 19, 64, 300]),
        "blocks": st.integers(34, 90),
        "block_size": st.sampled_from([4, 7, 16]),
        "prefix_cache": st.booleans(),
    }
)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=12)
@given(batch=requests, company=companies)
def test_a_batch_gives_the_bits_of_plain_decoding_alone(
    runners: dict[str, ModelRunner], dtype: str, batch: list[GenerateRequest], company: dict[str, int]
) -> None:
    """Ids and the best log-probabilities at every position, in chunks, trees, and after preemption."""
    expected, scripts = {}, {}
    for request in batch:
        (alone,) = run(engine(runners[dtype], Letters(), {}), [replace(request, plan=PLAIN)]).values()
        expected[request.request_id, 0] = alone
        scripts[request.request_id] = [*request.prompt, *alone.ids]
    served = engine(runners[dtype], Letters(), scripts, small=runners["small"], **company)
    found = run(served, batch)
    assert all(same_bits(found[key], expected[key]) for key in expected)


def test_companies_preempt_share_prefixes_and_accept_drafts(runners: dict[str, ModelRunner]) -> None:
    """What the test above claims to cover does happen."""
    prompt = tuple(range(VOCAB)) * 4
    sampling = SamplingParams(temperature=0.0, max_tokens=30, logprobs=3)
    plain = GenerateRequest("0", prompt, sampling)
    (alone,) = run(engine(runners["bfloat16"], Letters(), {}), [plain]).values()
    scripts = {str(i): [*prompt, *alone.ids] for i in range(6)}
    batch = [replace(plain, request_id=str(i), plan=SpeculationPlan("guesser", 5, 3)) for i in range(6)]
    shape = {"max_batch": 6, "budget": 64, "blocks": 40, "block_size": 7, "prefix_cache": True}
    driver = Driver(engine(runners["bfloat16"], Letters(), scripts, **shape))
    driver.submit(batch)
    driver.finish()
    assert all(same_bits(outcome, alone) for outcome in driver.outcomes.values())
    assert sum(report.preempted for report in driver.reports) > 0
    stats = [outcome.stats for outcome in driver.outcomes.values() if outcome.stats]
    assert sum(s.accepted for s in stats) > 60


def bits(runner: ModelRunner, tokens: list[int], cuts: list[int], mate: int = 0) -> tuple[Any, Any]:
    """Logits of every position and the KV of tokens fed up to each of `cuts`, beside `mate` other tokens."""
    own = with_pool(runner, 600, 4)
    blocks = list(range(0, 600, 2))
    beside = list(range(1, 600, 2))
    rows, start = [], 0
    for end in cuts:
        others = [Row(tokens[:mate], 0, beside, logits=0)] if mate else []
        row = Row(tokens[start:end], start, blocks, logits=end - start)
        rows.append(own.forward([*others, row]))
        start = end
    slots = [blocks[at // 4] * 4 + at % 4 for at in range(len(tokens))]
    return torch.cat(rows), own.read_kv(slots)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "window", "qwen3", "gelu"])
def test_long_contexts_in_any_chunks(dtype: str, family: str) -> None:
    """Over several strides of keys, with more tokens in a pass than any proven row count."""
    config, options = {
        "llama": (LlamaConfig, {"num_key_value_heads": 1}),
        "window": (MistralConfig, {"sliding_window": 100}),
        "qwen3": (Qwen3Config, {"head_dim": 16}),
        "gelu": (LlamaConfig, {"hidden_act": "gelu", "attention_bias": True}),  # the generic path
    }[family]
    model = tiny_model(config, vocab=VOCAB, **{"max_position_embeddings": 2048, **options})
    runner = load_runner(model, dtype, num_blocks=8, deterministic=True)
    form = HuggingFaceModel if family == "gelu" else LeanModel
    assert type(runner._model._model) is form
    tokens = torch.randint(VOCAB, (1100,), generator=torch.Generator().manual_seed(3)).tolist()
    logits, kv = bits(runner, tokens, [200, 400, 508, *range(509, 516), 700, 1000, 1022, 1023, 1024, 1100])
    for cuts, mate in (([1100], 0), ([1, 191, 193, 512, 513, 900, 1025, 1100], 600), ([300, 577, 1100], 5)):
        again, kv_again = bits(runner, tokens, cuts, mate)
        assert torch.equal(again, logits)
        assert all(
            torch.equal(a, b) for x, y in zip(kv_again, kv, strict=True) for a, b in zip(x, y, strict=True)
        )


def test_a_tree_of_64_nodes(runners: dict[str, ModelRunner]) -> None:
    runner = with_pool(runners["bfloat16"], 80, 4)
    choose = torch.Generator().manual_seed(4)
    prefix, tree = torch.randint(VOCAB, (40,), generator=choose).tolist(), []
    parents = [-1, *(int(torch.randint(-1, i, (1,), generator=choose)) for i in range(1, 64))]
    tree = torch.randint(VOCAB, (64,), generator=choose).tolist()
    logits = runner.forward([Row(prefix, 0, range(30), tree, parents)])
    for node in (0, 17, 40, 62, 63):
        path, at = [], node
        while at >= 0:
            path, at = [tree[at], *path], parents[at]
        plain = with_pool(runners["bfloat16"], 30, 4)
        plain.forward([Row(prefix, 0, range(30), logits=0)])
        for depth, token in enumerate(path):
            (alone,) = plain.forward([Row([token], 40 + depth, range(30))])
        assert torch.equal(logits[1 + node], alone)


def every_row_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(linear, "_agrees", lambda *_: False)
    patch.setattr(linear, "ROWS", tuple(range(1, 257)))
    patch.setattr(linear, "_agreeing_rows", lambda *_: Sizes(tuple(range(1, 257))))


def every_query_count(patch: pytest.MonkeyPatch) -> None:
    proven, agree = paths.proven_rows, []

    def unproven(call: Any, x: Any, candidates: Any) -> Sizes:
        agree.append(proven(call, x, candidates) == Sizes(tuple(candidates)))
        return Sizes(tuple(candidates))

    patch.setattr(paths, "proven_rows", unproven)
    with contextlib.suppress(ModelUnsupported):
        load("float32")
    if all(agree):
        pytest.skip("on this CPU every count of queries gives the same bits: nothing is left to notice")


def keys_without_padding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(paths.AttentionSizes, "keys", lambda self, n: n)


def keys_in_order_of_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(api.paths, "group", lambda batch, layout, sizes: cpu.group(batch, layout))


def activations_in_one_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(invariance.RowWise, "forward", lambda self, x: self._activation(x))


@pytest.mark.parametrize(
    ("mutant", "cfg"),
    [
        (every_row_count, {}),
        (every_query_count, {}),
        (keys_without_padding, {}),
        (keys_in_order_of_slots, {}),
        (activations_in_one_run, {"hidden_act": "gelu_pytorch_tanh", "intermediate_size": 44}),
    ],
)
def test_each_part_is_needed_and_the_check_at_load_notices(
    mutant: Callable[[pytest.MonkeyPatch], None], cfg: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(ModelUnsupported, match=r"cannot be served deterministically.* other bits"):
        load("float32", **cfg)


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_arithmetic_depends_on_the_company(dtype: str) -> None:
    """Else the tests above prove nothing."""
    tokens = torch.randint(VOCAB, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    runner = load(dtype, deterministic=False, max_position_embeddings=512)
    logits, _ = bits(runner, tokens, [*range(100, 201)])
    again, _ = bits(runner, tokens, [150, 200], mate=40)
    assert not torch.equal(again, logits)


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}, "outside of nn.Linear"),
        (GPT2Config, {"n_head": 4}, r"c_attn .Conv1D. multiplies with its 'weight' outside of nn.Linear"),
        (Gemma2Config, {"head_dim": 8, "query_pre_attn_scalar": 8}, "soft cap or sinks"),
    ],
)
def test_what_cannot_be_made_invariant_is_refused(config: Any, options: dict[str, Any], reason: str) -> None:
    model = tiny_model(config, **options)
    load_runner(model, "float32", num_blocks=8)
    with pytest.raises(ModelUnsupported, match=f"cannot be served deterministically.*{reason}"):
        load_runner(model, "float32", num_blocks=8, deterministic=True)


def test_layers_must_share_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([Sizes((4, 8)), Sizes((6,))])
    monkeypatch.setattr(linear, "_agreeing_rows", lambda *_: next(sizes))
    linears = linear.InvariantLinears()
    linears.pack(torch.randn(8, 4))
    with pytest.raises(ValueError, match="none in common"):
        linears.pack(torch.randn(8, 8))


def test_a_thread_computes_as_the_proof_did(runners: dict[str, ModelRunner]) -> None:
    runner, threads = with_pool(runners["float32"], 8, 4), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        runner.forward([Row([1, 2, 3], 0, [0])])
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(threads)


def test_rows_that_pad_a_call_reach_no_attention() -> None:
    class Counting(DenseAttention):
        def attend(self, layer: int, q: torch.Tensor, *rest: Any) -> torch.Tensor:
            assert q.shape[0] == 3
            return super().attend(layer, q, *rest)

    runner = load("float32")
    ids = torch.tensor([1, 2, 3])
    with torch.inference_mode():
        logits = runner._model.forward(ids, torch.arange(3), Counting(), None)
    assert logits.shape == (3, VOCAB)
    torch.testing.assert_close(logits, runner.forward([Row([1, 2, 3], 0, [0], logits=3)]), atol=1e-4, rtol=0)


def test_a_call_is_padded_once(monkeypatch: pytest.MonkeyPatch, runners: dict[str, ModelRunner]) -> None:
    """At the model's entry: padding in each layer would cost a hundred small copies a step."""
    monkeypatch.setattr(linear.InvariantLinear, "_padded", lambda *_: pytest.fail("padded again"))
    own = with_pool(runners["float32"], 300, 4)
    for tokens in (1, 2, 37, 255):
        assert own.forward([Row([1] * tokens, 0, range(80), logits=tokens)]).shape == (tokens, VOCAB)
    assert own.forward([Row([1] * 255, 0, range(80), logits=0)]).shape == (0, VOCAB)


def logits_that_know_the_batch(patch: pytest.MonkeyPatch) -> None:
    right = invariance.RowPadded.forward
    patch.setattr(
        invariance.RowPadded, "forward", lambda self, ids, *rest: right(self, ids, *rest) + len(ids)
    )


def keys_that_change_later(patch: pytest.MonkeyPatch) -> None:
    right = invariance._among_others

    def wrong(trial: Any, tokens: list[int], blocks: list[int], *rest: Any) -> Any:
        yield from right(trial, tokens, blocks, *rest)
        trial.pool.layers[1][0][blocks[3]] += 1

    patch.setattr(invariance, "_among_others", wrong)


@pytest.mark.parametrize(
    ("mutant", "noticed"),
    [
        (logits_that_know_the_batch, "a prompt's chunk has other bits"),
        (keys_that_change_later, "the KV of layer 1 has other bits"),
    ],
)
def test_the_check_at_load_compares_logits_and_kv(
    mutant: Callable[[pytest.MonkeyPatch], None], noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfcheck, "_compare", lambda *_: None)
    mutant(monkeypatch)
    with pytest.raises(ModelUnsupported, match=noticed):
        load("float32")


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_configuration_decides(deterministic: bool, tmp_path: Path) -> None:
    target = {"model": save_checkpoint(tmp_path), "kv": {"num_blocks": 40}, "deterministic": deterministic}
    runner = build_engine(parse({"target": target}, "test")).runner
    assert (runner._sizes is not None) is deterministic
    assert not parse({"target": {"model": "m"}}, "test").target.deterministic


@needs_embedded
@pytest.mark.smollm2
def test_the_embedded_model_in_bfloat16() -> None:
    """A part of what benchmarks/deterministic.py does with 200 requests."""
    tokenizer = load_tokenizer(MODEL)
    runner = load_runner(MODEL, "bfloat16", num_blocks=600, deterministic=True)
    batch = workload(int(os.environ.get("GAMMARAY_REQUESTS", "12")), tokenizer, least=6, most=12)
    ways = outcomes(runner, TokenizerDecoder(tokenizer), batch, plans=(), companies=COMPANIES[1:])
    _, plain = next(ways)
    for way, found in ways:
        assert [rid for rid in plain if not same_bits(found[rid], plain[rid])] == [], way
