"""The runner against transformers' own dense forward, on tiny random models of six architectures.

Rows are packed in shuffled blocks of a pool full of NaN, so a wrong slot, mask or position shows at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from tiny import tiny_model
from torch import Tensor
from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3Config,
)

from gammaray.engine.batch import Row
from gammaray.engine.hf import HuggingFaceModel
from gammaray.engine.lean import LeanModel
from gammaray.engine.loading import load_runner
from gammaray.engine.runner import ModelRunner

CONFIGS = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "mistral": (MistralConfig, {"sliding_window": 6}),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 8,
            "sliding_window": 6,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        GptOssConfig,
        {
            "head_dim": 8,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
LEAN = {"llama", "qwen3", "mistral"}
BLOCK_SIZE, BLOCKS = 4, 64
TREE = (-1, 0, -1, 2, 0, 3, 5)


class Setting:
    """A runner, the model it was made from, and blocks to hand out in random order."""

    def __init__(self, name: str) -> None:
        config, options = CONFIGS[name]
        self.model: PreTrainedModel = tiny_model(config, **options)
        self.runner = load_runner(self.model, "float32", block_size=BLOCK_SIZE, num_blocks=BLOCKS)
        self.model.set_attn_implementation("eager")
        self.random = random.Random(0)
        self.free = list(range(BLOCKS))
        self.random.shuffle(self.free)
        for k, v in self.runner._pool.layers:
            k.fill_(float("nan"))
            v.fill_(float("nan"))

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(32) for _ in range(count)]

    def blocks(self, slots: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-slots // BLOCK_SIZE))]

    @torch.no_grad()
    def truth(self, tokens: Sequence[int]) -> Tensor:
        """[T, V] by transformers alone."""
        return self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]


@pytest.fixture(params=CONFIGS)
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(request.param)


def path(tree: Sequence[int], node: int) -> list[int]:
    return [] if node < 0 else [*path(tree, TREE[node]), tree[node]]


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_lean_path_serves_the_llama_family() -> None:
    for name in CONFIGS:
        expected = LeanModel if name in LEAN else HuggingFaceModel
        assert type(Setting(name).runner._model) is expected, name


def test_packed_and_chunked_prefill_then_decode(setting: Setting) -> None:
    sequences = [setting.tokens(n) for n in (23, 5, 60)]  # rows of very different lengths
    blocks = [setting.blocks(len(s)) for s in sequences]
    cuts = ((7, 20, 22, 23), (2, 3, 4, 5), (40, 41, 59, 60))  # last: a decode step
    start = [0, 0, 0]
    for step in range(4):
        ends = [cut[step] for cut in cuts]
        rows = [
            Row(s[a:b], a, table, logits=step > 0)
            for s, a, b, table in zip(sequences, start, ends, blocks, strict=True)
        ]
        logits = setting.runner.forward(rows)
        assert logits.dtype == torch.float32 and not logits.is_inference()
        if step == 0:
            assert logits.shape == (0, 32)
        else:
            expected = [setting.truth(s[:b])[-1] for s, b in zip(sequences, ends, strict=True)]
            close(logits, torch.stack(expected))
        start = ends


def test_trees_of_several_rows(setting: Setting) -> None:
    prefixes, trees = [setting.tokens(n) for n in (19, 4, 33)], [setting.tokens(n) for n in (7, 3, 0)]
    blocks = [setting.blocks(len(p) + len(t)) for p, t in zip(prefixes, trees, strict=True)]
    setting.runner.forward([Row(p[:-1], 0, b) for p, b in zip(prefixes, blocks, strict=True)])
    rows = [
        Row(p[-1:], len(p) - 1, b, t, TREE[: len(t)]) for p, b, t in zip(prefixes, blocks, trees, strict=True)
    ]
    expected = [
        setting.truth([*prefix, *path(tree, node)])[-1]
        for prefix, tree in zip(prefixes, trees, strict=True)
        for node in range(-1, len(tree))
    ]
    close(setting.runner.forward(rows), torch.stack(expected))


def test_tree_fed_level_by_level(setting: Setting) -> None:
    """How a drafter grows a tree: the first level with the prefix, each next one alone."""
    prefix, tree = setting.tokens(11), setting.tokens(7)
    blocks = setting.blocks(len(prefix) + len(tree))
    close(setting.runner.forward([Row(prefix, 0, blocks)])[0], setting.truth(prefix)[-1])
    parents = (-1, -1, 0, 1, 0, 2, 5)  # levels: 0-1, 2-4, 5, 6
    for fed, grown in ((0, 2), (2, 5), (5, 6), (6, 7)):
        row = Row([], len(prefix), blocks, tree[:grown], parents[:grown], fed)
        logits = setting.runner.forward([row])
        for node in range(fed, grown):
            tokens, at = [], node
            while at >= 0:
                tokens, at = [tree[at], *tokens], parents[at]
            close(logits[node - fed], setting.truth([*prefix, *tokens])[-1])


def test_accepted_nodes_are_compacted_and_decoding_goes_on(setting: Setting) -> None:
    prefix, tree = setting.tokens(10), setting.tokens(7)
    blocks = setting.blocks(24)
    setting.runner.forward([Row(prefix, 0, blocks, tree, TREE)])
    accepted = [2, 3, 5]  # one branch of TREE, nodes that are not next to each other
    slot = [blocks[s // BLOCK_SIZE] * BLOCK_SIZE + s % BLOCK_SIZE for s in range(24)]
    setting.runner.move([slot[10 + n] for n in accepted], slot[10 : 10 + len(accepted)])
    committed = [*prefix, *(tree[n] for n in accepted), 7]
    logits = setting.runner.forward([Row([7], len(committed) - 1, blocks, tree[:3], TREE[:3])])
    close(logits[0], setting.truth(committed)[-1])
    close(logits[2], setting.truth([*committed, tree[0], tree[1]])[-1])
    dense, layers = setting.runner.dense(committed)
    close(dense, setting.truth(committed))
    for (k, v), (dense_k, dense_v) in zip(
        setting.runner.read_kv(slot[: len(committed)]), layers, strict=True
    ):
        close(k, dense_k)
        close(v, dense_v)


def test_a_row_does_not_depend_on_its_batch_mates(setting: Setting) -> None:
    tokens, tree = setting.tokens(13), setting.tokens(5)
    alone, together = setting.blocks(20), setting.blocks(20)
    solo = setting.runner.forward([Row(tokens, 0, alone, tree, TREE[:5])])
    mates = [Row(setting.tokens(n), 0, setting.blocks(n)) for n in (1, 40)]
    mixed = setting.runner.forward([mates[0], Row(tokens, 0, together, tree, TREE[:5]), mates[1]])
    torch.testing.assert_close(mixed[1:-1], solo, atol=2e-5, rtol=0)


def test_moves_may_overlap_and_may_be_empty(setting: Setting) -> None:
    runner: ModelRunner = setting.runner
    blocks = setting.blocks(12)
    runner.forward([Row(setting.tokens(12), 0, blocks)])
    slot = [blocks[s // BLOCK_SIZE] * BLOCK_SIZE + s % BLOCK_SIZE for s in range(12)]
    before = runner.read_kv(slot)
    runner.move([], [])
    runner.move(slot[4:8], slot[3:7])
    for (k, _), (old_k, _) in zip(runner.read_kv(slot), before, strict=True):
        assert torch.equal(k[3:7], old_k[4:8]) and torch.equal(k[7:], old_k[7:])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Row([1], 0, [0] * 17, [1] * 65, range(-1, 64)), "at most 64 nodes"),
        (Row([1, 2], 3, [0]), "cannot hold 5 slots"),
        (Row([1], 0, [0], [1, 1], [1, -1]), "parents first"),
        (Row([1], 0, [0], [1, 1], [-1]), "do not make a tree"),
        (Row([1], 0, [0], [1, 1], [-1, 0], fed=1), "root cannot be pending"),
        (Row([], 2, [0], [1], [-1], fed=1), "needs a token"),
        (Row([], 0, [0], [1], [-1]), "needs a root"),
    ],
)
def test_rows_that_cannot_be_packed(row: Row, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Setting("llama").runner.forward([row])
