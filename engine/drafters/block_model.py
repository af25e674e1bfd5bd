"""A small transformer that reads a whole block of tokens at once, over the target's hidden states as context.

Keys and values of the context come from the target's hidden states of several layers, projected to one; those
of a block from the block itself. Each place of a block sees all of the context and of the block, before and
behind it. (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147, section 3.1.)

Context slot i holds what the target's state at position i says: it depends on tokens 0 .. i and on no later
one, as no token goes in but through the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from gammaray.engine.attention import AttentionOptions, PagedAttention, paged_attention
from gammaray.engine.batch import transfer
from gammaray.engine.drafters.block_config import Backbone, BlockConfig
from gammaray.engine.drafters.weights import Weights
from gammaray.engine.hidden import FeatureModel
from gammaray.engine.lean import Linear
from gammaray.engine.linear import pack_linear
from gammaray.engine.pool import KVPool, KVShape
from gammaray.errors import ConfigError
from gammaray.kernels.api import PagedBatch, write_kv


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor  # [H]
    query: Linear
    key: Linear
    value: Linear
    query_norm: Tensor  # [D]
    key_norm: Tensor  # [D]
    out: Linear
    mlp_norm: Tensor  # [H]
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Block:
    """One sequence's block: where it begins and the pages that hold its context."""

    anchor: int  # the last committed token
    start: int  # its position, and the number of context slots, at least 1
    slots: Sequence[int]  # physical slots of the block's tokens
    blocks: Sequence[int]  # block table


class BlockModel:
    """Takes its part of `weights`; embeddings and head are the target's where the checkpoint has none."""

    def __init__(self, config: BlockConfig, weights: Weights, target: FeatureModel, hidden: int) -> None:
        """`hidden`: the target's hidden size. Raises ConfigError."""
        own = config.backbone
        if own.hidden_size != hidden:
            raise ConfigError(f"{weights.place}: hidden_size {own.hidden_size}, and the target has {hidden}")
        self.config = config
        self._own = own
        self._project = _linear(weights, "fc", hidden, len(config.layers) * hidden)
        self._context_norm = weights.take("hidden_norm.weight", hidden)
        self._norm = weights.take("norm.weight", hidden)
        self._layers = [_layer(weights, f"layers.{index}", own) for index in range(own.num_hidden_layers)]
        embedding = weights.find("embed_tokens.weight", own.vocab_size, hidden)
        self._embed = target.embed if embedding is None else lambda ids: F.embedding(ids, embedding)
        head = weights.find("lm_head.weight", config.draft_vocab, hidden)
        self._vocabulary = _vocabulary(weights, config)
        if head is None and self._vocabulary is not None:
            raise ConfigError(f"{weights.place}: no lm_head.weight for draft_vocab_size {config.draft_vocab}")
        self._head = target.head if head is None else pack_linear(head).forward
        rope = Qwen3RotaryEmbedding(config.rope)  # type: ignore[arg-type]
        self._inv_freq, self._rope_scale = rope.inv_freq.float().to(self._norm.device), rope.attention_scaling
        self._options = AttentionOptions(own.head_dim**-0.5)

    @property
    def shapes(self) -> list[KVShape]:
        own = self._own
        return [KVShape(own.num_key_value_heads, own.head_dim, own.head_dim)] * own.num_hidden_layers

    def add_context(self, pool: KVPool, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write KV of the target's hidden states [T, L * H] at `positions` [T] to physical `slots` [T]."""
        states = self._rms(self._project(features), self._context_norm)  # [T, H]
        rope = self._rope(positions, states.dtype)
        for index, layer in enumerate(self._layers):
            write_kv(*self._keys(layer, states, rope), *pool.layers[index], slots)

    def run(self, pool: KVPool, blocks: Sequence[Block]) -> Tensor:
        """Hidden states [N, B, H] of N blocks: the last committed token, and masks behind it."""
        size = self.config.block_size
        attention = paged_attention(pool, batch := _batch(blocks, size, pool.device))
        ids = [token for block in blocks for token in (block.anchor, *[self.config.mask_token] * (size - 1))]
        x = self._embed(transfer(torch.tensor(ids), pool.device))  # [N * B, H]
        rope = self._rope(batch.positions, x.dtype)
        for index, layer in enumerate(self._layers):
            h = self._rms(x, layer.input_norm)
            x = x + layer.out(self._attend(index, layer, h, rope, attention))
            h = self._rms(x, layer.mlp_norm)
            x = x + layer.down(F.silu(layer.gate(h)) * layer.up(h))
        states: Tensor = self._rms(x, self._norm).unflatten(0, (len(blocks), size))
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Of states [M, H] over the draft vocabulary: [M, Vd] float32."""
        logits: Tensor = self._head(hidden).float()
        return logits

    def spread(self, logits: Tensor) -> Tensor:
        """[M, Vd] over the target's vocabulary: [M, V]; tokens that are not drafted get -inf."""
        if self._vocabulary is None:
            return logits
        whole = logits.new_full((len(logits), self._own.vocab_size), float("-inf"))
        return whole.index_copy_(1, self._vocabulary, logits)

    def _attend(
        self, index: int, layer: _Layer, h: Tensor, rope: tuple[Tensor, Tensor], attention: PagedAttention
    ) -> Tensor:
        q = self._rms(layer.query(h).unflatten(-1, (-1, self._own.head_dim)), layer.query_norm)
        k, v = self._keys(layer, h, rope)
        return attention.attend(index, _rotate(q, *rope), k, v, self._options).flatten(1)

    def _keys(self, layer: _Layer, states: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """k and v [T, Hkv, D] of states [T, H]."""
        shape = (-1, self._own.head_dim)
        k = self._rms(layer.key(states).unflatten(-1, shape), layer.key_norm)
        return _rotate(k, *rope), layer.value(states).unflatten(-1, shape)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._own.rms_norm_eps)

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, D]; RoPE pairs dimension i with i + D/2 (2104.09864, eq. 34)."""
        angles = (positions[:, None, None].float() * self._inv_freq).repeat(1, 1, 2)
        cos, sin = angles.cos() * self._rope_scale, angles.sin() * self._rope_scale
        return cos.to(dtype), sin.to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _batch(blocks: Sequence[Block], size: int, device: torch.device) -> PagedBatch:
    """Blocks as draft trees whose every node sees every other."""
    count, widest = len(blocks), max(len(block.blocks) for block in blocks)
    everything = -1 if size == 64 else (1 << size) - 1  # as a signed 64-bit integer
    table = [[*block.blocks, *[0] * (widest - len(block.blocks))] for block in blocks]
    starts = torch.tensor([block.start for block in blocks])
    places = starts.repeat_interleave(size)
    columns = (
        torch.tensor(table),
        torch.arange(count + 1) * size,
        starts + size,
        starts,
        places + torch.arange(size).repeat(count),
        places,
        torch.full((count * size, 1), everything),
        torch.tensor([slot for block in blocks for slot in block.slots]),
    )
    return PagedBatch(*(transfer(column, device) for column in columns))


def _layer(weights: Weights, name: str, own: Backbone) -> _Layer:
    hidden, inner, size = own.hidden_size, own.intermediate_size, own.head_dim
    queries, keys = own.num_attention_heads * size, own.num_key_value_heads * size
    return _Layer(
        input_norm=weights.take(f"{name}.input_layernorm.weight", hidden),
        query=_linear(weights, f"{name}.self_attn.q_proj", queries, hidden),
        key=_linear(weights, f"{name}.self_attn.k_proj", keys, hidden),
        value=_linear(weights, f"{name}.self_attn.v_proj", keys, hidden),
        query_norm=weights.take(f"{name}.self_attn.q_norm.weight", size),
        key_norm=weights.take(f"{name}.self_attn.k_norm.weight", size),
        out=_linear(weights, f"{name}.self_attn.o_proj", hidden, queries),
        mlp_norm=weights.take(f"{name}.post_attention_layernorm.weight", hidden),
        gate=_linear(weights, f"{name}.mlp.gate_proj", inner, hidden),
        up=_linear(weights, f"{name}.mlp.up_proj", inner, hidden),
        down=_linear(weights, f"{name}.mlp.down_proj", hidden, inner),
    )


def _linear(weights: Weights, name: str, outputs: int, inputs: int) -> Linear:
    return pack_linear(weights.take(f"{name}.weight", outputs, inputs)).forward


def _vocabulary(weights: Weights, config: BlockConfig) -> Tensor | None:
    """The target's ids [Vd] of the draft vocabulary, of which `d2t` tells the distances; None: the same."""
    size = config.backbone.vocab_size
    distances = weights.find("d2t", config.draft_vocab)
    if config.draft_vocab == size:
        return None
    if distances is None:
        raise ConfigError(f"{weights.place}: draft_vocab_size {config.draft_vocab} needs a tensor d2t")
    ids = torch.arange(config.draft_vocab, device=distances.device) + distances.long()
    if not bool(((ids >= 0) & (ids < size)).all()) or len(ids.unique()) < len(ids):
        raise ConfigError(f"{weights.place}: d2t does not name distinct tokens of the target")
    return ids
