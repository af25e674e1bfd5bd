"""What depends on the device, as far as a machine without a GPU can tell. Nothing here ever ran on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_llama, tiny_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3Config

from gammaray.config import parse
from gammaray.engine import build, lean
from gammaray.engine.attention import AttentionOptions
from gammaray.engine.batch import Row, pack
from gammaray.engine.device import check_combination, resolve_device, resolve_dtype
from gammaray.engine.drafters.ngram import NgramDrafter as Ngram
from gammaray.engine.linear import PackedLinear, PlainLinear, pack_linear
from gammaray.engine.loading import load_config, load_runner
from gammaray.engine.pool import KVPool, KVShape, bytes_per_block, share_left
from gammaray.engine.room import Footprint, footprint
from gammaray.errors import ConfigError

META = torch.device("meta")
CUDA = torch.device("cuda")


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """What torch says of the machine's GPU; None: there is none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_the_gpu_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, None)
    assert resolve_device().type == resolve_device("cpu").type == "cpu"
    gpu(monkeypatch, (9, 0))
    assert resolve_device() == torch.device("cuda", 0) and resolve_device("cpu").type == "cpu"
    assert resolve_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "'cuda': this process sees no GPU"),
        ("meta", "'meta' is not supported, use one of: auto, cpu, cuda"),
        ("gpu0", "'gpu0' is not supported, use one of: auto, cpu, cuda"),
    ],
)
def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch, device: str, message: str) -> None:
    gpu(monkeypatch, None)
    with pytest.raises(ConfigError, match=message):
        load_runner(tiny_llama(), device=device)


@pytest.mark.parametrize(
    ("capability", "dtype"), [((9, 0), torch.bfloat16), ((8, 0), torch.bfloat16), ((7, 5), torch.float16)]
)
def test_gpus_compute_in_bfloat16_if_they_can(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    gpu(monkeypatch, capability)
    assert resolve_dtype("auto", CUDA) is dtype
    assert resolve_dtype("float32", CUDA) is torch.float32


@pytest.mark.parametrize(
    ("deterministic", "ranks", "what"), [(True, 1, "deterministic"), (False, 2, "tensor_")]
)
def test_what_works_on_cpus_only(deterministic: bool, ranks: int, what: str) -> None:
    check_combination(torch.device("cpu"), deterministic, ranks)
    check_combination(CUDA, False, 1)
    with pytest.raises(ConfigError, match=f"{what}.* works on CPUs only: leave it out, or hide the GPUs"):
        check_combination(CUDA, deterministic, ranks)


def test_a_step_reaches_a_device_whole() -> None:
    """Catches a tensor of a step that stays behind: all of them are views of the one that is transferred."""
    step = pack([Row([1, 2], 0, [3]), Row([4], 5, [1, 2], [5, 6], [-1, 0])], 4)
    there = step.to(META)
    tensors = [there.input_ids, there.wanted, *(getattr(there.paged, n) for n in there.paged.__slots__)]
    assert len(tensors) == 10 and all(x.device == META and x._base is there.flat for x in tensors)
    assert there.paged.block_table.shape == (2, 2) and there.paged.ancestors.shape == (5, 1)


def test_a_pool_lies_where_it_was_told() -> None:
    pool = KVPool([KVShape(2, 8, 8)] * 3, 4, 16, torch.float16, META)
    assert all(x.device == META and x.shape == (5, 16, 2, 8) for pair in pool.layers for x in pair)


def test_only_a_cpu_has_its_weights_packed() -> None:
    """Catches a weight of a GPU that is handed to oneDNN."""
    assert isinstance(pack_linear(torch.randn(8, 8)), PackedLinear | PlainLinear)
    assert isinstance(pack_linear(torch.randn(8, 8, device=META)), PlainLinear)


def test_both_ways_to_an_rms_norm_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a GPU's way that reads the doubled weights, or another epsilon."""
    norm = nn.RMSNorm(16)
    nn.init.normal_(norm.weight)
    x, doubled = torch.randn(5, 16), lean.doubled(norm)
    used: list[tuple[Any, ...]] = []

    def watched(*args: Any) -> Tensor:
        used.append(args)
        return torch.rms_norm(*args)

    monkeypatch.setattr(F, "rms_norm", watched)
    assert lean.rms_norm(x.to(META), doubled.to(META), 1e-3).shape == x.shape
    shape, weight, eps = used[0][1:]
    assert weight.shape == shape == (16,) and eps == 1e-3
    torch.testing.assert_close(torch.rms_norm(x, shape, norm.weight, eps), lean.rms_norm(x, doubled, eps))


def test_the_lean_pass_never_waits_for_the_device() -> None:
    """Catches a number that is read back, which a capture cannot: tensors of `meta` have none to give."""

    class Nothing:
        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
            return torch.empty_like(q)

    model = lean.LeanModel(tiny_model(Qwen3Config, head_dim=8).to(META))
    step = pack([Row([1, 2, 3], 0, [0], [4, 5], [-1, 0])], 8).to(META)
    assert model.forward(step.input_ids, step.paged.positions, Nothing(), step.wanted).shape == (3, 32)


def test_a_process_takes_no_more_than_its_share_of_a_gpu() -> None:
    """Catches a pool that counts the share of another process as its own."""
    assert share_left(free=90, total=100, share=1.0, reserved=10) == 90
    assert share_left(free=60, total=100, share=0.5, reserved=10) == 40
    assert share_left(free=20, total=100, share=0.5, reserved=10) == 20
    assert share_left(free=20, total=100, share=0.5, reserved=55) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_the_footprint_is_what_the_model_takes(dtype: torch.dtype, tied: bool) -> None:
    """Catches weights that are counted twice, and heads of queries taken for those of keys."""
    for config in ((Qwen3Config, {"head_dim": 16, "tie_word_embeddings": tied}), (LlamaConfig, {})):
        model = tiny_model(config[0], **config[1]).to(dtype)
        expected = sum(parameter.numel() * dtype.itemsize for parameter in model.parameters())
        runner = load_runner(model, dtype, block_size=4, num_blocks=4)
        found = footprint(model.config, dtype, 4)
        shapes = [KVShape(k.shape[2], k.shape[3], v.shape[3]) for k, v in runner._pool.layers]
        assert found.weights == expected and found.block == bytes_per_block(shapes, 4, dtype)


def test_blocks_leave_room_for_the_models_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a pool that takes the memory of a drafter that is yet to be loaded."""
    monkeypatch.setattr("gammaray.engine.loading.usable_memory", lambda device: 1_000_000)

    def blocks(*beside: Footprint) -> int:
        return load_runner(tiny_llama(), "float32", 4, memory=0.5, max_model_len=8, beside=beside).num_blocks

    own = 2 * 4 * 2 * 2 * 8 * 4  # layers, tokens, keys and values, heads, numbers, bytes
    assert blocks() == 64 * 2 == 128  # of 976 that there is room for
    assert blocks(Footprint(900_000, 0)) == 50_000 // own
    assert blocks(Footprint(900_000, own)) == 50_000 // (2 * own)
    with pytest.raises(ConfigError, match="more than the 0 MiB set aside"):
        blocks(Footprint(1_000_001, 0))


def test_drafters_of_this_process_are_beside_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a drafter that lives elsewhere and is counted, and one without a model."""
    tiny_llama().save_pretrained(tmp_path)
    model = {"method": "model", "model": str(tmp_path)}
    drafters = {"here": model, "there": model, "both": model, "table": {"method": "ngram"}}
    tenants = {name: {"drafter": name} for name in ("here", "there", "both", "table")}
    tenants["other"] = {"drafter": "both"}
    config = parse({"target": {"model": "x"}, "drafters": drafters, "tenants": tenants}, "test")
    pools = {(name, name): lambda size: Ngram() for name in ("there", "both")}
    assert build._beside(config, pools) == []  # on a CPU
    gpu(monkeypatch, (9, 0))
    expected = footprint(load_config(str(tmp_path)), torch.bfloat16, 16)
    assert build._beside(config, pools) == [expected] * 2
