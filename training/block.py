"""The block drafter as a module that learns (DSpark, arXiv 2607.05147): what `engine/drafters/block_model.py`
and `markov.py` compute, dense, for many blocks of one text at once.

Its state dict has the keys of the speculators layout. Embeddings, and without a smaller draft vocabulary also
the head, are the target's and stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from gammaray.engine.drafters.block_config import Backbone, BlockConfig
from gammaray.training.heads import TargetHead

Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Told:
    """What the module says of N blocks of D places."""

    logits: Tensor  # [N, D, Vd]
    confidence: Tensor | None  # [N, D], before the sigmoid


class BlockModule(nn.Module):
    embedding: Tensor
    inv_freq: Tensor

    def __init__(self, config: BlockConfig, embedding: Tensor, head: TargetHead, own_head: bool) -> None:
        """`embedding` [V, H]: the target's; `head`: its head, of the draft vocabulary. `own_head`: that is
        only what a head of its own begins with."""
        super().__init__()
        own = config.backbone
        size = own.hidden_size
        self.config = config
        self.fc = nn.Linear(len(config.layers) * size, size, bias=False)
        self.hidden_norm, self.norm = (nn.RMSNorm(size, own.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList(_Layer(own) for _ in range(own.num_hidden_layers))
        self.markov_head = MarkovModule(config) if config.rank else None
        self.confidence_head = _ConfidenceModule(config) if config.confident else None
        self.head, self.lm_head = head, None
        if own_head:
            self.lm_head = nn.Linear(size, config.draft_vocab, bias=False)
            self.lm_head.weight = nn.Parameter(head.rows.clone())
        self.register_buffer("embedding", embedding, persistent=False)
        rope = Qwen3RotaryEmbedding(config.rope)  # type: ignore[arg-type]
        self.register_buffer("inv_freq", rope.inv_freq.float(), persistent=False)
        self._scale: float = rope.attention_scaling

    def forward(self, tokens: Tensor, features: Tensor, anchors: Tensor) -> Told:
        """Blocks behind the last committed tokens at `anchors` [N], each at least 1, of a text: tokens [T]
        and the target's states [T, L * H]. The Markov head reads the text, not what would be drafted."""
        places = anchors[:, None] + torch.arange(self.config.block_size, device=anchors.device)  # [N, B]
        hidden = self._backbone(tokens[anchors], features, anchors, places)  # [N, B, H]
        skipped = self.config.block_size - self.config.drafted
        hidden = hidden[:, skipped:]  # [N, D, H]
        logits = self.head.logits(hidden) if self.lm_head is None else self.lm_head(hidden)
        embedded = None
        if self.markov_head is not None:
            before = places[:, : self.config.drafted].clamp(max=len(tokens) - 1)  # the text's end
            embedded, bias = self.markov_head(tokens[before], hidden)
            logits = logits + bias
        sure = None if self.confidence_head is None else self.confidence_head(hidden, embedded)
        return Told(logits, sure)

    def _backbone(self, last: Tensor, features: Tensor, anchors: Tensor, places: Tensor) -> Tensor:
        """[N, B, H]; `last` [N]: the first token of each block, behind which masks stand."""
        count, size = places.shape
        features = features[: int(anchors.max())]  # nobody sees more
        context = self.hidden_norm(self.fc(features))  # [T, H]
        ids = last.new_full((count, size), self.config.mask_token)
        ids[:, 0] = last
        x = F.embedding(ids.flatten(), self.embedding)  # [N * B, H]
        rope = self._rope(torch.cat([torch.arange(len(context), device=places.device), places.flatten()]))
        sees = _sees(anchors, size, len(context))
        for layer in self.layers:
            x = layer(x, context, rope, sees)
        states: Tensor = self.norm(x).unflatten(0, (count, size))
        return states

    def _rope(self, positions: Tensor) -> Rope:
        """cos and sin [T, 1, D]; RoPE pairs dimension i with i + D/2 (2104.09864, eq. 34)."""
        angles = (positions[:, None, None].float() * self.inv_freq).repeat(1, 1, 2)
        return angles.cos() * self._scale, angles.sin() * self._scale


class _Layer(nn.Module):
    """Qwen3's, whose attention reads the context too."""

    def __init__(self, own: Backbone) -> None:
        super().__init__()
        size = own.hidden_size
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(size, own.rms_norm_eps) for _ in range(2)
        )
        self.self_attn, self.mlp = _Attention(own), _Mlp(size, own.intermediate_size)

    def forward(self, x: Tensor, context: Tensor, rope: Rope, sees: Tensor) -> Tensor:
        """x [M, H], context [T, H] -> [M, H]."""
        x = x + self.self_attn(self.input_layernorm(x), context, rope, sees)
        mixed: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mixed


class _Attention(nn.Module):
    def __init__(self, own: Backbone) -> None:
        super().__init__()
        size, head = own.hidden_size, own.head_dim
        self.q_proj = nn.Linear(size, own.num_attention_heads * head, bias=False)
        self.k_proj, self.v_proj = (
            nn.Linear(size, own.num_key_value_heads * head, bias=False) for _ in range(2)
        )
        self.o_proj = nn.Linear(own.num_attention_heads * head, size, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(head, own.rms_norm_eps) for _ in range(2))
        self._head, self._shared = head, own.num_attention_heads // own.num_key_value_heads

    def forward(self, x: Tensor, context: Tensor, rope: Rope, sees: Tensor) -> Tensor:
        """x [M, H] of blocks; `rope` and `sees` [M, T + M]: of slots of the context, then of the blocks."""
        own = rope[0][len(context) :], rope[1][len(context) :]
        q = _rotate(self.q_norm(self._heads(self.q_proj(x))), own)  # [M, Hq, D]
        both = torch.cat([context, x])  # [T + M, H]
        k = _rotate(self.k_norm(self._heads(self.k_proj(both))), rope)
        k, v = (
            part.repeat_interleave(self._shared, 1).transpose(0, 1)[None]
            for part in (k, self._heads(self.v_proj(both)))
        )  # [1, Hq, T + M, D]
        mixed = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, sees)[0]  # [Hq, M, D]
        out: Tensor = self.o_proj(mixed.transpose(0, 1).flatten(1))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(-1, (-1, self._head))
        return split


class _Mlp(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MarkovModule(nn.Module):
    """See `gammaray.engine.drafters.markov`."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank, size = config.rank, config.backbone.hidden_size
        self.markov_w1 = nn.Embedding(config.backbone.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab, bias=False)
        self._kind = config.markov
        if self._kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self._kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def forward(self, previous: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens before each place [N, D], states [N, D, H] -> embeddings [N, D, r], bias [N, D, Vd]."""
        e: Tensor = self.markov_w1(previous)
        mixed = e
        if self._kind == "gated":
            mixed = self.gate_proj(torch.cat([hidden, e], -1)).sigmoid() * e
        elif self._kind == "rnn":
            mixed = self._recurrent(e, hidden)
        return e, self.markov_w2(mixed)

    def _recurrent(self, e: Tensor, hidden: Tensor) -> Tensor:
        state, told = torch.zeros_like(e[:, 0]), []
        for own, h in zip(e.unbind(1), hidden.unbind(1), strict=True):  # place by place
            gate, candidate, output = self.joint_proj(torch.cat([state, own, h], -1)).chunk(3, -1)
            keep = gate.sigmoid()
            state = keep * state + (1 - keep) * candidate.tanh()
            told.append(output.tanh())
        return torch.stack(told, 1)


class _ConfidenceModule(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self._embeds = config.confidence_embeds
        self.proj = nn.Linear(config.backbone.hidden_size + (config.rank if self._embeds else 0), 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """[N, D, H] and [N, D, r] -> [N, D], before the sigmoid. Teaches nothing to what it reads."""
        read = hidden if not self._embeds or embedded is None else torch.cat([hidden, embedded], -1)
        told: Tensor = self.proj(read.detach())[..., 0]
        return told


def _rotate(x: Tensor, rope: Rope) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * rope[0] + torch.cat([-second, first], -1) * rope[1]


def _sees(anchors: Tensor, size: int, length: int) -> Tensor:
    """[N * B, T + N * B]: all slots before the block, which is its anchor's state too, and its own block."""
    context = torch.arange(length, device=anchors.device) < anchors[:, None]  # [N, T]
    block = torch.eye(len(anchors), dtype=torch.bool, device=anchors.device)
    whole = block.repeat_interleave(size, 0).repeat_interleave(size, 1)  # [N * B, N * B]
    return torch.cat([context.repeat_interleave(size, 0), whole], 1)
