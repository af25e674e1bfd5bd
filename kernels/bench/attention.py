"""Attention at the sizes of Llama 3, beside torch's SDPA, with a dense mask for trees, and FlexAttention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from gammaray.kernels.api import PagedBatch, paged_tree_attention, plan_attention
from gammaray.kernels.bench.case import (
    BF16,
    LARGE_BATCH,
    LARGE_CONTEXT,
    LLAMA_3_8B,
    LLAMA_3_70B,
    Case,
    Comparison,
    Heads,
    Ready,
)

BATCHES, CONTEXTS, NODES = (1, 8, 32, 128), (1024, 8192, 65536), (1, 8, 32, 64)
FLEX = ((8, 8192, 1), (8, 8192, 64), (32, 8192, 8), (1, 65536, 8))  # batch, context, nodes; of the 8B model
PAGE = 16
TOLERANCE = 2e-2  # bfloat16 has 8 bits, and the truth is computed in float32


@dataclass(frozen=True, slots=True)
class Shape:
    heads: Heads
    batch: int
    context: int  # committed tokens of each row
    nodes: int  # query tokens of each row; 1 decodes

    @property
    def keys(self) -> int:
        return self.context + self.nodes

    @property
    def pages(self) -> int:
        """Of one row."""
        return -(-self.keys // PAGE)

    @property
    def moved(self) -> int:
        """Keys and values once, queries and results once."""
        numbers = 2 * self.keys * self.heads.key + 2 * self.nodes * self.heads.query
        return self.batch * numbers * self.heads.size * BF16

    @property
    def operations(self) -> int:
        """Two products over the keys that each node sees: the context and its ancestors."""
        seen = sum(self.context + bits.bit_count() for bits in tree(self.nodes))
        return self.batch * seen * 4 * self.heads.query * self.heads.size

    @property
    def memory(self) -> int:
        numbers = 2 * self.pages * PAGE * self.heads.key + 4 * self.nodes * self.heads.query
        return self.batch * numbers * self.heads.size * BF16

    @property
    def sizes(self) -> dict[str, str | int]:
        return {
            "model": self.heads.model,
            "batch": self.batch,
            "context": self.context,
            "nodes": self.nodes,
            "group": self.heads.group,
        }


def tree(nodes: int) -> list[int]:
    """Ancestors of each node of a binary tree, itself included, as bits."""
    masks: list[int] = []
    for node in range(nodes):
        masks.append((masks[(node - 1) // 2] if node else 0) | 1 << node)
    return masks


def shapes() -> Iterator[Shape]:
    """Large ones last: should time run out, they are what is dropped."""
    for context, batch, heads, nodes in product(CONTEXTS, BATCHES, (LLAMA_3_8B, LLAMA_3_70B), NODES):
        yield Shape(heads, batch, context, nodes)


def cases(device: torch.device) -> Iterator[Case]:
    pools = Pools(device)
    yield from (case(shape, pools) for shape in shapes())


def case(shape: Shape, pools: Pools) -> Case:
    comparisons = [Comparison("sdpa", 1.0, partial(_sdpa, shape, pools))]
    if shape.heads == LLAMA_3_8B and (shape.batch, shape.context, shape.nodes) in FLEX:
        comparisons.append(Comparison("flex_attention", 20.0, partial(_flex, shape, pools)))
    return Case(
        kernel="attention",
        sizes=shape.sizes,
        moved=shape.moved,
        operations=shape.operations,
        memory=shape.memory,
        tolerance=TOLERANCE,
        prepare=partial(_ready, shape, pools),
        comparisons=tuple(comparisons),
        seconds=15.0,  # the first of a size tries several tiles
        goal=shape.batch >= LARGE_BATCH and shape.context >= LARGE_CONTEXT,
    )


class Pools:
    """Keys and values of random numbers that all cases share, grown to the largest."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = device, dtype
        self._pools: tuple[Tensor, ...] = ()

    def of(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """Two of [pages, PAGE, Hkv, D]."""
        pages, tail = shape.batch * shape.pages, (PAGE, shape.heads.key, shape.heads.size)
        if not self._pools or self._pools[0].shape[1:] != tail or self._pools[0].shape[0] < pages:
            self._pools = ()  # what is there is freed first
            empty = partial(torch.empty, (pages, *tail), device=self.device, dtype=self.dtype)
            self._pools = (empty().normal_(), empty().normal_())
        k, v = self._pools
        return k[:pages], v[:pages]

    def queries(self, shape: Shape) -> Tensor:
        """[T, H, D], T = batch * nodes; the same ones for the same shape."""
        size = (shape.batch * shape.nodes, shape.heads.query, shape.heads.size)
        same = torch.Generator(self.device).manual_seed(0)
        return torch.randn(size, generator=same, device=self.device).to(self.dtype)


def paged(shape: Shape, device: torch.device) -> PagedBatch:
    """Rows of one length in pages that lie at random."""
    rows, tokens = torch.arange(shape.batch + 1, device=device), shape.batch * shape.nodes
    full = partial(torch.full, dtype=torch.int64, device=device)
    table = torch.randperm(shape.batch * shape.pages, device=device).view(shape.batch, shape.pages)
    bits = torch.tensor([mask - (mask >> 63 << 64) for mask in tree(shape.nodes)], device=device)
    depth = torch.tensor([mask.bit_count() - 1 for mask in tree(shape.nodes)], device=device)
    slot = shape.context + torch.arange(shape.nodes, device=device)
    return PagedBatch(
        block_table=table,
        cu_seqlens=rows * shape.nodes,
        context_lens=full((shape.batch,), shape.keys),
        tree_start=full((shape.batch,), shape.context),
        positions=(shape.context + depth).repeat(shape.batch),
        visible=full((tokens,), shape.context),
        ancestors=bits.repeat(shape.batch)[:, None],  # [T, 1]
        slots=(table[:, slot // PAGE] * PAGE + slot % PAGE).flatten(),
    )


def _ready(shape: Shape, pools: Pools) -> Ready:
    k, v = pools.of(shape)
    q, batch = pools.queries(shape), paged(shape, pools.device)
    plan = plan_attention(batch, PAGE, q.dtype, group_size=shape.heads.group)
    run = partial(paged_tree_attention, q, k, v, plan, scaling=shape.heads.size**-0.5)
    return Ready(run, partial(_error, shape, batch, q, k, v))


def _error(shape: Shape, batch: PagedBatch, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> float:
    """Of the last row, against softmax in float32."""
    at = torch.arange(shape.keys, device=q.device)
    slots = batch.block_table[-1][at // PAGE] * PAGE + at % PAGE
    keys, values = (pool.flatten(0, 1)[slots].float() for pool in (k, v))  # [S, Hkv, D]
    own = q[-shape.nodes :].float().unflatten(1, (shape.heads.key, shape.heads.group))  # [Q, Hkv, G, D]
    scores = torch.einsum("qhgd,shd->qhgs", own, keys) * shape.heads.size**-0.5
    scores.masked_fill_(~_seen(shape, q.device)[:, None, None], -math.inf)
    truth = torch.einsum("qhgs,shd->qhgd", scores.softmax(-1), values).flatten(1, 2)
    return float((out[-shape.nodes :].float() - truth).abs().max() / truth.abs().max())


def _seen(shape: Shape, device: torch.device) -> Tensor:
    """[Q, S] bool."""
    bits = torch.tensor([[mask >> node & 1 for node in range(shape.nodes)] for mask in tree(shape.nodes)])
    return F.pad(bits.bool(), (shape.context, 0), value=True).to(device)


def _dense(shape: Shape, pools: Pools) -> tuple[Tensor, Tensor]:
    """Keys and values [B, Hkv, S, D] that lie in one piece: a reader without block tables."""
    k, v = (
        pool.view(shape.batch, -1, *pool.shape[2:])[:, : shape.keys].transpose(1, 2)
        for pool in pools.of(shape)
    )
    return k, v


def _sdpa(shape: Shape, pools: Pools) -> Callable[[], object]:
    """The heads that share a key head are further queries, and one mask serves all rows."""
    k, v = _dense(shape, pools)
    rows = shape.nodes * shape.heads.group
    q = pools.queries(shape).view(shape.batch, shape.nodes, shape.heads.key, -1, shape.heads.size)
    q = q.permute(0, 2, 3, 1, 4).reshape(shape.batch, shape.heads.key, rows, shape.heads.size)
    if shape.nodes == 1:  # sees every key
        return lambda: F.scaled_dot_product_attention(q, k, v)
    seen = _seen(shape, pools.device).repeat(shape.heads.group, 1)  # [G * Q, S]
    bias = torch.zeros(rows, -(-shape.keys // 16) * 16, device=pools.device, dtype=q.dtype)  # aligned rows
    bias = bias[:, : shape.keys].masked_fill_(~seen, -math.inf).expand(shape.batch, 1, -1, -1)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _flex(shape: Shape, pools: Pools) -> Callable[[], object]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    k, v = _dense(shape, pools)
    q = pools.queries(shape).view(shape.batch, shape.nodes, shape.heads.query, -1).transpose(1, 2)
    ancestors, context = paged(shape, pools.device).ancestors[: shape.nodes, 0], shape.context

    def seen(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        node = (key - context).clamp(0, 63)
        return (key < context) | ((ancestors[query] >> node) & 1 == 1)

    mask = create_block_mask(seen, None, None, shape.nodes, shape.keys, device=str(pools.device))
    attend = torch.compile(flex_attention, dynamic=False)
    return lambda: attend(q, k, v, block_mask=mask, enable_gqa=True)
