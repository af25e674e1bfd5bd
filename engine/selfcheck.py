"""Fail closed: before a model serves, its paged forward must equal transformers' own dense forward.

Some architectures ignore AttentionInterface without an error, or keep state that leaks from one packed
request to the next. So the check packs two requests in shuffled pages, prefills in chunks, and verifies a
chain and a tree with branches. In float32 every position must agree; 16-bit rounding alone can turn a single
position upside down in a correct model, so there it is the median that must.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gammaray.engine.attention import DenseAttention, Model, paged_attention
from gammaray.engine.batch import Row, pack
from gammaray.engine.pool import KVPool, KVShape
from gammaray.errors import ModelUnsupported

BLOCK_SIZE = 4
BLOCKS_FIRST, BLOCKS_SECOND = (9, 2, 7, 0, 11, 4, 8), (5, 10, 1)
TREE_PARENTS = (-1, 0, -1, 2, 0)
QUANTILE = {torch.float32: 1.0, torch.bfloat16: 0.5, torch.float16: 0.5}  # of the positions' errors
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}  # of the logits' spread


@dataclass(frozen=True, slots=True)
class Truth:
    """Token sequences and transformers' own logits for them."""

    first: tuple[int, ...]  # 18 tokens
    second: tuple[int, ...]  # 9 tokens
    tree: tuple[int, ...]  # draft after `first`, shaped by TREE_PARENTS
    logits: Mapping[tuple[int, ...], Tensor]  # sequence -> [T, V]


def record_truth(model: PreTrainedModel) -> Truth:
    """Run the untouched model densely, with its own attention, one sequence at a time."""
    vocab_size = model.config.get_text_config().vocab_size
    draws = torch.randint(vocab_size, (32,), generator=torch.Generator().manual_seed(7))
    tokens = tuple(draws.tolist())
    first, second, tree = tokens[:18], tokens[18:27], tokens[27:]
    paths = [first + _path(tree, leaf) for leaf in range(len(tree))]
    logits = {
        path: model(input_ids=torch.tensor([path], device=model.device), use_cache=False).logits[0].float()
        for path in [*paths, second]
    }
    return Truth(first, second, tree, logits)


def probe(model: Model, truth: Truth, config: object) -> DenseAttention:
    """Run a model densely through our attention; returns what that saw of each layer.

    Raises ModelUnsupported unless every layer attends exactly once, with the window that the config names,
    and the logits are transformers' own.
    """
    seen, device = DenseAttention(), model.embeddings.device
    ids = torch.tensor(truth.second, device=device)
    logits = model.forward(ids, torch.arange(len(ids), device=device), seen, None)
    layers = int(getattr(config, "num_hidden_layers", 0))
    if sorted(seen.kv) != list(range(layers)):
        raise ModelUnsupported(
            f"{layers} layers, but attention was called for layers {sorted(seen.kv)}: the others keep "
            "another kind of state, or go around AttentionInterface"
        )
    for layer in range(layers):
        _check_window(config, layer, seen.options[layer].window)
    _compare("dense attention", logits, truth.logits[truth.second])
    return seen


def check(model: Model, truth: Truth, shapes: Sequence[KVShape], dtype: torch.dtype) -> None:
    """Compare paged logits with the truth: chain drafts, a chunked prefill, decode and a tree."""
    blocks = len(BLOCKS_FIRST + BLOCKS_SECOND) + 2
    pool = KVPool(shapes, blocks, BLOCK_SIZE, dtype, model.embeddings.device)
    first, second, tree = truth.first, truth.second, truth.tree
    steps = [
        [
            Row(first[:9], 0, BLOCKS_FIRST, first[9:17], range(-1, 7)),
            Row(second[:5], 0, BLOCKS_SECOND, logits=False),
        ],
        [
            Row(first[17:], 17, BLOCKS_FIRST, tree, TREE_PARENTS),
            Row(second[5:7], 5, BLOCKS_SECOND, second[7:], range(-1, 1)),
        ],
    ]
    prefilled, verified = (_forward(model, pool, rows) for rows in steps)
    paths = [truth.logits[first + _path(tree, node)] for node in range(len(tree))]
    _compare("a chain draft", prefilled, paths[0][8:17])
    _compare("a draft tree", verified[:6], torch.stack([paths[0][17], *(path[-1] for path in paths)]))
    _compare("the second request", verified[6:], truth.logits[second][6:])


def _forward(model: Model, pool: KVPool, rows: Sequence[Row]) -> Tensor:
    step = pack(rows, pool.block_size).to(pool.device)
    return model.forward(step.input_ids, step.paged.positions, paged_attention(pool, step.paged), step.wanted)


def _path(tree: Sequence[int], node: int) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    while node >= 0:
        path, node = (tree[node], *path), TREE_PARENTS[node]
    return path


def _check_window(config: object, layer: int, window: int | None) -> None:
    types = getattr(config, "layer_types", None)
    configured = getattr(config, "sliding_window", None)
    kind = types[layer] if types else "sliding_attention" if configured else "full_attention"
    if kind not in ("full_attention", "sliding_attention"):
        raise ModelUnsupported(f"layer {layer} is of the kind {kind!r}")
    expected = configured if kind == "sliding_attention" else None
    if window != expected:
        raise ModelUnsupported(f"layer {layer} attends with a window of {window}, its config says {expected}")


def _compare(what: str, got: Tensor, expected: Tensor) -> None:
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    errors = (got.float() - expected).norm(dim=-1) / spread  # [positions]
    error = float(errors.quantile(QUANTILE[got.dtype]))
    if not error <= TOLERANCE[got.dtype]:  # NaN fails too
        raise ModelUnsupported(
            f"{what} differs from transformers' own forward: relative error {error:.2g}, "
            f"at most {TOLERANCE[got.dtype]:.2g} allowed"
        )
