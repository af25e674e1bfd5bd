"""The EAGLE-3 head as a module that learns: what `engine/drafters/eagle3.py` computes, by SpecForge's keys.

It tells the same in another order: of many drafts at once, as `ttt.unroll` has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gammaray.training.ttt import Sight


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a head. By default the decoder layer is as large as one of the target's."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int  # of the target
    positions: int
    eps: float
    theta: float

    @classmethod
    def like(cls, target: Any, inner: int = 0) -> Shape:
        """`target`: the configuration of the text model, in transformers' form; `inner`: 0 for its own."""
        rope = getattr(target, "rope_parameters", None) or {}
        heads = target.num_attention_heads
        return cls(
            hidden=target.hidden_size,
            inner=inner or getattr(target, "intermediate_size", None) or 4 * target.hidden_size,
            heads=heads,
            kv_heads=getattr(target, "num_key_value_heads", None) or heads,
            head_size=getattr(target, "head_dim", None) or target.hidden_size // heads,
            vocab=target.vocab_size,
            positions=target.max_position_embeddings,
            eps=float(getattr(target, "rms_norm_eps", 1e-6)),
            theta=float(rope.get("rope_theta", 10000.0)),
        )

    def config(self) -> dict[str, Any]:
        """As transformers' LlamaConfig and SpecForge name it."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
        }


class HeadModule(nn.Module):
    """`own_rows` [Vd, H]: what lm_head begins with; None: the head reads rows of the target's.

    A few numbers of a hidden state are often a thousand times the others, so fc learns on features divided by
    `scale` [F], and is exported with that in its weights.
    """

    scale: Tensor

    def __init__(self, shape: Shape, scale: Tensor, own_rows: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("scale", scale.float())
        self.fc = nn.Linear(len(scale), shape.hidden, bias=False)
        self.midlayer = WideLayer(shape)
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        if own_rows is not None:
            self.lm_head = nn.Linear(shape.hidden, len(own_rows), bias=False)
            self.lm_head.weight = nn.Parameter(own_rows.float().clone())

    def enter(self, features: Tensor) -> Tensor:
        """The target's features [..., F] as the states [..., H] that drafts begin with."""
        entered: Tensor = self.fc(features.float() / self.scale)
        return entered.float()  # what layers add to, also where they compute in bfloat16

    def tensors(self) -> dict[str, Tensor]:
        """By SpecForge's keys, as the engine computes with them."""
        found = {key: x.detach() for key, x in self.state_dict().items() if key != "scale"}
        return found | {"fc.weight": found["fc.weight"] / self.scale}


class WideLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(shape.hidden, shape.eps) for _ in range(3)
        )
        self.self_attn, self.mlp = WideAttention(shape), Mlp(shape)

    def forward(self, embedded: Tensor, states: Tensor, level: int, sight: Sight) -> Tensor:
        """See `gammaray.training.ttt.Layer`."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], -1)  # [B, T, 2H]
        x = states + self.self_attn(both, level, sight)
        behind: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return behind


class WideAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * shape.hidden, shape.heads * shape.head_size, bias=False)
        self.k_proj, self.v_proj = (
            nn.Linear(2 * shape.hidden, shape.kv_heads * shape.head_size, bias=False) for _ in range(2)
        )
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.hidden, bias=False)
        self._size, self._theta = shape.head_size, shape.theta

    def forward(self, x: Tensor, level: int, sight: Sight) -> Tensor:
        """x [B, T, 2H] -> [B, T, H]."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self._size)).transpose(1, 2)  # [B, Hq or Hkv, T, D]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        angles = self._angles(level + torch.arange(x.shape[1], device=x.device))
        mixed = sight.attend(_rotate(q, angles), _rotate(k, angles), v)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _angles(self, positions: Tensor) -> Tensor:
        """[T, D], of dimensions i and i + D/2, which are a pair (2104.09864, eq. 34)."""
        turns = self._theta ** (-torch.arange(0, self._size, 2, device=positions.device) / self._size)
        return (positions[:, None].float() * turns).repeat(1, 2)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(shape.hidden, shape.inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    turned: Tensor = x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
    return turned.to(x.dtype)
