"""Sizes of checkpoints, and what a configuration asks for."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.embedded import MODEL, needs_embedded

from gammaray.cluster import checkpoint
from gammaray.cluster.checkpoint import Checkpoint, read, size_of_name
from gammaray.cluster.demand import demand
from gammaray.cluster.gguf_header import read_header
from gammaray.config import parse
from gammaray.errors import ConfigError

LLAMA = {
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}


def write(folder: Path, config: dict[str, Any], **files: dict[str, np.ndarray]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return str(folder)


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


def test_a_folder_tells_its_sizes(tmp_path: Path) -> None:
    found = read(write(tmp_path, LLAMA, model={"a": zeros(10, 7), "b": zeros(5)}))
    assert found == Checkpoint(
        75, layers=3, heads=8, kv_heads=2, head_dim=8, hidden=64, vocabulary=100, max_length=512
    )
    assert (found.weights("auto"), found.weights("float32")) == (150, 300)
    assert found.kv_per_token("auto") == 2 * 3 * 2 * 8 * 2


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "head_dim": 8, "num_attention_heads": 4},
        {"text_config": LLAMA},
        {"n_layer": 3, "n_head": 2, "n_embd": 16, "vocab_size": 100, "n_positions": 512},
    ],
)
def test_spellings_of_the_same_cache(tmp_path: Path, config: dict[str, Any]) -> None:
    found = read(write(tmp_path, config, model={"a": zeros(1)}))
    assert (found.kv_per_token("float32"), found.max_length) == (2 * 3 * 2 * 8 * 4, 512)


def test_shards_of_a_target_divide_the_kv_heads() -> None:
    found = Checkpoint(10, layers=3, kv_heads=2, head_dim=8)
    assert found.kv_per_token("auto", 2) == found.kv_per_token("auto") // 2


def test_an_index_names_the_files(tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA, one={"a": zeros(4)}, two={"b": zeros(6)}, consolidated={"a": zeros(10)})
    index = {"metadata": {"total_size": 2000}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / checkpoint.INDEX).write_text(json.dumps(index))
    assert read(folder).parameters == 10
    (tmp_path / "two.safetensors").unlink()
    assert read(folder).parameters == 2000 // 2  # as the index says, in the checkpoint's 16 bits


def test_quantised_weights_stay_as_large_as_they_are(tmp_path: Path) -> None:
    packed = {**LLAMA, "quantization_config": {"quant_method": "gptq"}}
    found = read(write(tmp_path, packed, model={"a": zeros(100, dtype="int32")}))
    assert found.weights("bfloat16") == found.weights("float32") == 400
    plain = read(write(tmp_path, {**LLAMA, "quantization_config": None}))
    assert plain.weights("bfloat16") == 200


def tiny_gguf(file: Path, parts: int = 0, tensors: bool = True) -> Path:
    writer = gguf.GGUFWriter(file, "llama")
    if parts:
        writer.add_uint16("split.count", parts)
    if tensors:
        writer.add_tensor("output_norm.weight", zeros(32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_gguf_file_is_whole_and_has_weights(tmp_path: Path) -> None:
    assert read(str(tiny_gguf(tmp_path / "whole.gguf", parts=1))).parameters == 32
    with pytest.raises(ConfigError, match="one of 3 parts: merge them"):
        read(str(tiny_gguf(tmp_path / "part-00001-of-00003.gguf", parts=3)))
    with pytest.raises(ConfigError, match="has no tensors"):
        read(str(tiny_gguf(tmp_path / "vocabulary.gguf", tensors=False)))


def test_a_gguf_file(tmp_path: Path) -> None:
    """Also read by the package's own reader, which is slow for real vocabularies."""
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_embedding_length(32)
    writer.add_context_length(256)
    writer.add_vocab_size(50)
    writer.add_token_list(["a", "bc", "déf"])
    writer.add_token_scores([0.5, 0.25, 0.125])
    writer.add_array("test.nested", [[1, 2], [3]])
    writer.add_tensor("token_embd.weight", zeros(50, 32))
    writer.add_tensor("output_norm.weight", zeros(32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = gguf.GGUFReader(file)
    parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
    found = read(str(file))
    assert found.parameters == parameters == 50 * 32 + 32
    assert (found.layers, found.kv_heads, found.head_dim, found.max_length) == (2, 2, 8, 256)
    fields, _ = read_header(file)
    assert set(fields) == {name for name in reader.fields if not name.startswith("GGUF.")}


@needs_embedded
def test_the_packaged_model() -> None:
    found = read(MODEL)
    assert (found.parameters, found.layers, found.max_length) == (134_515_008, 30, 8192)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", 70),
        ("mistralai/Mixtral-8x7B-v0.1", 56),
        ("HuggingFaceTB/SmolLM2-135M", 0.135),
        ("Qwen/Qwen2.5-1.5B", 1.5),
        ("Qwen/Qwen3-30B-A3B", 30),
        ("org-7b/name-2b", 2),
        ("models/llama-8B/", 8),
        ("gpt2", None),
        ("name-4bit", None),
        ("phi-3.5-mini", None),
    ],
)
def test_sizes_in_names(name: str, billions: float | None) -> None:
    found = size_of_name(name)
    assert found == (None if billions is None else round(billions * 1e9))


@pytest.mark.parametrize(
    ("billions", "layers", "kv_heads", "head_dim"),
    [(0.135, 30, 3, 64), (1.24, 16, 8, 64), (8.03, 32, 8, 128), (70.6, 80, 8, 128), (405, 126, 8, 128)],
)
def test_estimated_kv_is_right_within_a_factor_of_two(
    billions: float, layers: int, kv_heads: int, head_dim: int
) -> None:
    truth = 2 * layers * kv_heads * head_dim * 2
    assert 0.5 < Checkpoint(round(billions * 1e9)).kv_per_token("auto") / truth < 2


def test_an_id_is_read_from_the_local_cache_else_off_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    guessed = read("org/some-7B")
    assert guessed.parameters == 7_000_000_000 and "read off its name" in (guessed.note or "")
    repository = tmp_path / "models--org--some-7B"
    write(repository / "snapshots" / "abc", LLAMA)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    only_config = read("org/some-7B")
    assert (only_config.parameters, only_config.layers) == (7_000_000_000, 3)
    assert "weights are not there" in (only_config.note or "")
    write(repository / "snapshots" / "abc", LLAMA, model={"a": zeros(3)})
    assert read("org/some-7B") == read(str(repository / "snapshots" / "abc"))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: "gpt2", "download it first"),
        (lambda folder: "model-0B", "download it first"),
        (lambda folder: f"{'9' * 400}B", "cannot read the checkpoint"),
        (lambda folder: "a" * 5000, "cannot read the checkpoint"),
        (lambda folder: "./nowhere", "no such file or folder"),
        (lambda folder: str(folder / "nowhere-7B.gguf"), "no such file or folder"),
        (lambda folder: str(folder), "cannot read the checkpoint"),
        (lambda folder: write(folder, LLAMA), "weights are not there"),
        (lambda folder: write(folder, {**LLAMA, "num_hidden_layers": "many"}), "cannot read the checkpoint"),
        (lambda folder: write(folder, {**LLAMA, "num_hidden_layers": -5}), "ValueError: layers cannot be -5"),
        (lambda folder: write(folder, {**LLAMA, "num_hidden_layers": math.inf}), "OverflowError"),
        (lambda folder: write(folder, {**LLAMA, "max_position_embeddings": -1}), "max_length cannot be -1"),
        (lambda folder: write(folder, {**LLAMA, "max_position_embeddings": 0}), "max_length cannot be 0"),
        (lambda folder: write(folder, {**LLAMA, "max_position_embeddings": 10**400}), "max_length cannot"),
    ],
)
def test_what_cannot_be_read_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, says: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError, match=says):
        read(make(folder))


def test_a_configuration_nested_deeply(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="RecursionError"):
        read(str(tmp_path))


def header(data: object) -> bytes:
    text = json.dumps(data).encode()
    return struct.pack("<Q", len(text)) + text


def tensor(*shape: int, offsets: tuple[int, ...] = (0, 8)) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n", "Git LFS pointer"),
        (b"\x10", "unpack"),
        (struct.pack("<Q", 2**40) + b"{}", "not whole"),
        (struct.pack("<Q", 2**63) + b"{}", "not whole"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "RecursionError"),
        (header([]), "AttributeError"),
        (header(tensor(4, offsets=(0,))), "IndexError"),
        (header(tensor(10**400)), "ValueError: parameters cannot be 1000"),
        (header({"a": {"shape": [math.inf], "data_offsets": [0, 8]}}), "OverflowError"),
        (header(tensor(-5, 3)), "ValueError: parameters cannot be -15"),
    ],
)
def test_broken_safetensors_are_a_config_error(tmp_path: Path, content: bytes, says: str) -> None:
    folder = write(tmp_path, LLAMA)
    (tmp_path / checkpoint.WEIGHTS).write_bytes(content)
    with pytest.raises(ConfigError, match="cannot read the checkpoint") as raised:
        read(folder)
    assert says in str(raised.value) and len(str(raised.value)) < 400


def value(kind: int, *rest: bytes) -> bytes:
    """A GGUF file with one key, whose value is of `kind`."""
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    return b"".join((start, struct.pack("<I", kind), *rest))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"GGUF\x09\x00\x00\x00" + bytes(16),
        b"nothing of it",
        *(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, length) for length in (2**36, 2**62, 2**63)),
        value(9, struct.pack("<IQ", 9, 1) * 5000),
        value(9, struct.pack("<IQ", 8, 2**60)),
        value(9, struct.pack("<IQ", 12, 2**63)),
        value(9, struct.pack("<IQQ", 8, 3, 2**64 - 1)),
    ],
)
def test_a_broken_gguf_is_a_config_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="is it a GGUF file"):
        read(str(file))


def config(folder: Path, **target: object) -> Any:
    """Three tenants: a model drafter with a pool, n-gram, and speculation off."""
    big = write(folder / "big", LLAMA, model={"a": zeros(1000)})
    small = write(folder / "small", {**LLAMA, "num_hidden_layers": 1}, model={"a": zeros(10)})
    drafters = {
        "small": {"method": "model", "model": small, "placement": "split", "draft_sampling": True},
        "lookup": {"method": "ngram"},
        "unused": {"method": "model", "model": "of-unknown-size"},
    }
    tenants = {
        "chat": {"drafter": "small", "pool": {"workers": 3}, "speculation": {"gamma": 4}},
        "code": {"drafter": "lookup"},
        "off": {"drafter": "unused", "speculation": {"enabled": False}},
    }
    return parse(
        {
            "target": {"model": big, **target},
            "drafters": drafters,
            "tenants": tenants,
            "placement": {"min_nvlink_version": 3},
        },
        "test",
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "shards", "fitting"),
    [(8, 2, 4, "1 or 2"), (8, None, 3, "1 or 2 or 4 or 8"), (6, 2, 3, "1 or 2"), (10, 4, 4, "1 or 2")],
)
def test_a_size_that_the_engine_refuses_is_refused(
    tmp_path: Path, heads: int, kv_heads: int | None, shards: int, fitting: str
) -> None:
    shape = {**LLAMA, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    folder = write(tmp_path, shape, model={"a": zeros(1000)})
    config = parse({"target": {"model": folder, "tensor_parallel": shards}}, "test")
    with pytest.raises(ConfigError, match=rf"tensor_parallel: {shards} does not divide .*: use {fitting}$"):
        demand(config)


def test_sequences_longer_than_anything_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"target\.max_model_len"):
        demand(parse({"target": {"model": "org/some-7B", "max_model_len": 10**400}}, "test"))


def test_demand_of_a_configuration(tmp_path: Path) -> None:
    asked = demand(config(tmp_path, replicas=2, tensor_parallel=2, max_model_len=100))
    target = asked.target
    assert (target.replicas, target.tensor_parallel, target.weights) == (2, 2, 1000)
    assert target.kv == 100 * 2 * 3 * 1 * 8 * 2  # one of two heads each
    assert (target.feature_bytes, target.q_bytes, asked.min_nvlink_version) == (128, 400, 3)
    chat, code = asked.drafts
    assert (chat.tenant, chat.drafter, chat.light, chat.wish, chat.workers) == (
        "chat",
        "small",
        False,
        "split",
        3,
    )
    assert (chat.weights, chat.kv) == (20, 100 * 2 * 1 * 2 * 8 * 2)
    assert chat.round_bytes == 4 * (8 + 64 * 8)
    assert (code.tenant, code.light, code.weights) == ("code", True, 0)


def test_sequences_are_as_long_as_the_model_allows(tmp_path: Path) -> None:
    whole = demand(config(tmp_path)).target.kv
    assert whole == 512 * 2 * 3 * 2 * 8 * 2
    assert demand(config(tmp_path, max_model_len=10_000)).target.kv == whole


def test_without_sizes_nothing_is_read() -> None:
    asked = demand(parse({"target": {"model": "of-unknown-size"}}, "test"), sizes=False)
    assert (asked.target.weights, asked.target.kv, asked.notes) == (0, 0, ())


def test_guesses_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    notes = demand(parse({"target": {"model": "org/some-7B"}}, "test")).notes
    assert any("read off its name" in note for note in notes)
    assert any("8192 tokens" in note for note in notes)
