"""Hidden states beside the logits, against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_llama, tiny_model
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, PhiConfig, PreTrainedModel

from gammaray.engine.batch import Row
from gammaray.engine.hf import HuggingFaceModel
from gammaray.engine.lean import LeanModel
from gammaray.engine.loading import load_runner
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
GEMMA = {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
MODELS = {
    "llama": (LlamaConfig, {}, LeanModel),
    "gemma3": (Gemma3TextConfig, GEMMA, HuggingFaceModel),
    "gpt2": (GPT2Config, {}, HuggingFaceModel),
}


@torch.no_grad()
def truth(model: PreTrainedModel) -> list[torch.Tensor]:
    """[T, H] after 0, 1, ... layers; transformers' own last one is behind the final norm."""
    found: list[torch.Tensor] = []
    last = getattr(model.base_model, "norm", None) or model.base_model.ln_f
    hook = last.register_forward_pre_hook(lambda module, args: found.append(args[0][0]))
    states = model(input_ids=torch.tensor([TOKENS]), use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    return [*(state[0] for state in states[:-1]), found[0]]


@pytest.mark.parametrize("name", MODELS)
def test_features_are_transformers_hidden_states(name: str) -> None:
    config, options, form = MODELS[name]
    model = tiny_model(config, layers=4, **options)
    runner = load_runner(model, "float32", block_size=4, num_blocks=16)
    assert type(runner._model) is form
    expected = truth(model)
    runner.forward([Row(TOKENS[:4], 0, [5, 2, 9], logits=0)])
    rows = [Row([7, 8], 0, [1]), Row(TOKENS[4:7], 4, [5, 2, 9], TOKENS[7:], range(-1, 2), logits=2)]
    logits, features = runner.forward_features(rows, (1, 4, 0, 2))
    torch.testing.assert_close(
        features[2:], torch.cat([expected[i][4:] for i in (1, 4, 0, 2)], -1), atol=1e-4, rtol=0
    )
    assert torch.equal(logits, runner.forward(rows))  # asking changes nothing
    assert features.shape == (8, 4 * 32) and not features.is_inference()


@pytest.mark.parametrize("name", MODELS)
def test_behind_the_last_norm_is_what_the_head_reads(name: str) -> None:
    config, options, _ = MODELS[name]
    runner = load_runner(tiny_model(config, layers=4, **options), "float32", block_size=4, num_blocks=16)
    rows = [Row(TOKENS, 0, [5, 2, 9], logits=len(TOKENS))]
    logits, features = runner.forward_features(rows, (0, 5))
    embedded, normed = features.chunk(2, -1)
    with torch.inference_mode():
        torch.testing.assert_close(runner.telling.head(normed), logits, atol=1e-5, rtol=0)
        given = runner.telling.embed(torch.tensor(TOKENS))
    if name != "gpt2":  # adds positions to its embeddings
        torch.testing.assert_close(embedded, given, atol=1e-5, rtol=0)


HEADS = {**MODELS, "phi": (PhiConfig, {}, HuggingFaceModel)}  # whose head has a bias


@pytest.mark.parametrize("name", HEADS)
def test_rows_of_the_head_make_its_logits(name: str) -> None:
    """What shares some rows would else draft from a packed layout, other tokens, or without the bias."""
    config, options, _ = HEADS[name]
    model = tiny_model(config, layers=2, **options)
    if name == "phi":
        torch.nn.init.normal_(model.lm_head.bias)
    telling = load_runner(model, "float32", block_size=4, num_blocks=16).telling
    tokens, states = torch.tensor([7, 3, 31]), torch.randn(5, 32)
    with torch.inference_mode():
        expected = telling.head(states)[:, tokens]
        found = torch.nn.functional.linear(states, *telling.head_rows(tokens))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_form_of_foreign_models_agrees_with_the_lean_one() -> None:
    lean = load_runner(tiny_llama(), "float32", num_blocks=4)
    plain = ModelRunner(HuggingFaceModel(tiny_llama()), lean._pool, vocab_size=32, max_model_len=64)
    rows = [Row(TOKENS, 0, [0])]
    for one, other in zip(*(runner.forward_features(rows, (1, 2)) for runner in (lean, plain)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_features_are_of_the_models_dtype() -> None:
    runner = load_runner(tiny_llama(), "bfloat16", num_blocks=4)
    logits, features = runner.forward_features([Row(TOKENS, 0, [0])], (2,))
    assert (logits.dtype, features.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("layers", [(4,), (-1,)])
def test_a_layer_that_is_not_there_is_refused(layers: Any) -> None:
    runner = load_runner(tiny_llama(), "float32", num_blocks=4)
    with pytest.raises(ConfigError, match="the model has 0 to 3"):
        runner.forward_features([Row(TOKENS, 0, [0])], layers)
