"""Medusa heads: what they read, their trees and layouts, and that the target's cache stays of use."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import block_heads
from support.decoding import run
from support.heads import Tensors, write
from support.tape import Letters
from tiny import tiny_llama
from torch import Tensor
from transformers import PreTrainedModel

from gammaray.drafter_config import MedusaDrafter as Settings
from gammaray.engine.batch import Row
from gammaray.engine.drafters import medusa
from gammaray.engine.drafters.base import DraftTree, DraftView
from gammaray.engine.drafters.registry import Making
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.loading import load_runner
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError
from gammaray.types import GenerateRequest, SamplingParams, SpeculationPlan

VOCAB = 12
FIRST, SECOND = [3, 1, 4, 1, 5, 9, 2, 6], [8, 9, 7]
World = tuple[PreTrainedModel, ModelRunner]


@pytest.fixture(scope="module")
def world() -> World:
    model = tiny_llama(VOCAB, layers=2, max_position_embeddings=96)
    return model, load_runner(model, "float32", block_size=4, num_blocks=32)


def make(world: World, path: str) -> medusa.MedusaDrafter:
    return medusa.make(Making("m", Settings(method="medusa", path=path), world[1], "target", None))  # type: ignore[arg-type]


def view(rid: str, length: int, depth: int, width: int) -> DraftView:
    return DraftView(rid, length, depth, width, SamplingParams(temperature=0.0), 0)


@torch.no_grad()
def normed(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """[T, H], what the target's head reads: transformers' last hidden states."""
    found: Tensor = model.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
    return found


def told(world: World, drafter: medusa.MedusaDrafter, tokens: list[int]) -> Tensor:
    """What the target tells this drafter: [T, H]."""
    rows = [Row(tokens, 0, range(-(-len(tokens) // world[1].block_size)))]
    return world[1].forward_features(rows, drafter.layers)[1]


def expected(tensors: Tensors, state: Tensor, heads: int) -> Tensor:
    """Log-probabilities [K, V]."""
    rows = []
    for head in range(heads):
        x = state
        for block in range(2):
            name = f"{head}.{block}.linear"
            x = x + F.silu(tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"])
        rows.append((tensors[f"{head}.2.weight"] @ x).log_softmax(-1))
    return torch.stack(rows)


def test_each_head_reads_the_state_behind_the_last_but_one_token(world: World, tmp_path: Path) -> None:
    """Two sequences at once: chains of the heads' best tokens, with their probabilities."""
    model, _ = world
    tensors = block_heads.medusa(model)
    drafter = make(world, write(tmp_path, tensors, block_heads.medusa_settings()))
    for rid, tokens in (("a", FIRST), ("b", SECOND)):
        drafter.catch_up(rid, tokens[:-2])
        assert drafter.length(rid) == len(tokens) - 2
        drafter.commit(rid, tokens[-2:], told(world, drafter, tokens)[-3:-1])
    wanted = view("a", len(FIRST), 9, 1), view("b", len(SECOND), 2, 1), view("c", 4, 2, 1), view("a", 3, 2, 1)
    trees = drafter.collect(drafter.begin(wanted[:3]), 0.0)
    assert set(trees) == {"a", "b"} and drafter.collect(drafter.begin(wanted[3:]), 0.0) == {}
    for (rid, tokens), depth in zip((("a", FIRST), ("b", SECOND)), (4, 2), strict=True):
        rows = expected(tensors, normed(model, tokens)[-2], depth)
        assert trees[rid].tokens == tuple(rows.argmax(-1).tolist())
        assert trees[rid].parents == tuple(range(-1, depth - 1))
        assert trees[rid].confidence == pytest.approx(rows.amax(-1).exp().tolist(), abs=1e-4)


def scored(tree: DraftTree, rows: Tensor) -> list[float]:
    found: list[float] = []
    levels: list[int] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        levels.append(0 if parent < 0 else levels[parent] + 1)
        found.append(float(rows[levels[-1], token]) + (found[parent] if parent >= 0 else 0.0))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_tree_has_the_best_nodes_of_all(seed: int) -> None:
    """Against all paths, one by one; each node once."""
    rows = (3 * torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))).log_softmax(-1)
    scores, tokens = rows.topk(4)
    tree = medusa.best_tree(tokens.tolist(), scores.tolist(), view("r", 5, 3, 3))
    every = [
        sum(float(rows[level, token]) for level, token in enumerate(path))
        for levels in (1, 2, 3)
        for path in product(range(4), repeat=levels)
    ]
    assert sorted(scored(tree, rows), reverse=True) == pytest.approx(
        sorted(every, reverse=True)[:9], abs=1e-5
    )
    assert len(set(zip(tree.tokens, tree.parents, strict=True))) == len(tree)
    assert tree.depth <= 3 and all(parent < node for node, parent in enumerate(tree.parents))


@pytest.mark.parametrize(
    "prefix, pickled, named", [("", False, 4), ("medusa_heads.", False, 2), ("medusa_head.", True, 4)]
)
def test_public_layouts_say_the_same(
    world: World, tmp_path: Path, prefix: str, pickled: bool, named: int
) -> None:
    """With each prefix, in both formats, and where config.json knows of fewer heads than there are."""
    tensors = block_heads.medusa(world[0])
    renamed = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    path = write(tmp_path, renamed, block_heads.medusa_settings(named), pickled)
    if pickled:
        (tmp_path / "pytorch_model.bin").rename(tmp_path / "medusa_lm_head.pt")
    drafter = make(world, path)
    drafter.catch_up("a", FIRST[:-1])
    drafter.commit("a", FIRST[-1:], told(world, drafter, FIRST)[-2:-1])
    tree = drafter.collect(drafter.begin([view("a", len(FIRST), 4, 1)]), 0.0)["a"]
    rows = expected(tensors, normed(world[0], FIRST)[-2], 4)
    assert tree.tokens == tuple(rows.argmax(-1).tolist())


def test_the_target_reuses_all_of_its_cache(world: World, tmp_path: Path) -> None:
    """The heads need one state only, which a pass of the target always brings."""
    path = write(tmp_path, block_heads.medusa(world[0]), block_heads.medusa_settings())
    options = EngineOptions(max_batch=2, token_budget=32, oracle=True)
    engine = Engine(world[1], Letters(), [], {"m": make(world, path)}, options)
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
    prompt = tuple(FIRST * 3)
    first, again = (GenerateRequest(rid, prompt, sampling, SpeculationPlan("m", 3, 2)) for rid in "ab")
    (found,) = run(engine, [first]).values()
    engine.submit(again)
    chunks = []
    while not engine.idle:
        chunks += engine.step().chunks
    assert chunks[-1].cached_tokens == 20  # whole blocks before the last token
    assert chunks[-1].stats == found.stats and found.stats is not None and found.stats.accepted > 0


@pytest.mark.parametrize(
    "config, change, message",
    [
        ({"medusa_num_heads": 0}, {}, "medusa_num_heads, a positive number"),
        ({"medusa_num_heads": 5}, {}, "no tensor '4.0.linear.weight'"),
        ({}, {"0.2.weight": torch.zeros(VOCAB + 1, 32)}, r"0.2.weight is \[13, 32\], expected \[12, 32\]"),
        ({}, {"0.0.linear.weight": torch.zeros(16, 16)}, r"is \[16, 16\], expected \[32, 32\]"),
        ({}, {"token_map": torch.zeros(3)}, "unknown tensors token_map"),
    ],
)
def test_what_it_cannot_read_is_refused(
    world: World, tmp_path: Path, config: dict[str, Any], change: Tensors, message: str
) -> None:
    tensors = block_heads.medusa(world[0]) | change
    path = write(tmp_path, tensors, block_heads.medusa_settings() | config)
    with pytest.raises(ConfigError, match=message):
        make(world, path)
