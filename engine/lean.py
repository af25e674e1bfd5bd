"""A compact forward pass for models of the Llama family: the same weights, a third of the calls.

Query, key and value projections are one matrix, gate and up another, and only the wanted tokens reach the
head. Whether the result is the same is proven at load (`selfcheck.py`), not assumed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from gammaray.engine.attention import Attention, AttentionOptions, RotatingAttention
from gammaray.engine.hidden import Taps
from gammaray.engine.linear import Pack, pack_linear, pack_module
from gammaray.engine.sharding import RowwiseLinear

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
Linear = Callable[[Tensor], Tensor]
Rotation = tuple[Tensor, Tensor]  # cos and signed sin, each [T, 1, D]


@dataclass(frozen=True, slots=True)
class LeanLayer:
    """One decoder layer. Heads are those that are here: a rank of several has its share of the config's."""

    heads: int  # of queries
    kv_heads: int
    eps: float
    input_norm: Tensor  # [2 * hidden], see `rms_norm`
    qkv: Linear
    qk_norm: tuple[Tensor, Tensor] | None  # each [D]: Qwen3 normalises every head
    out: Linear
    mlp_norm: Tensor  # [2 * hidden]
    gate_up: Linear
    down: Linear
    options: AttentionOptions

    def attend(self, index: int, h: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        """What the normed states h [T, hidden] find: [T, hidden]. Attends as layer `index`."""
        (cos, sin), tokens = rotation, h.shape[0]
        rotated = self.heads + self.kv_heads
        qkv = self.qkv(h).view(tokens, rotated + self.kv_heads, -1)
        qk = qkv[:, :rotated]  # [T, H + Hkv, D]
        if self.qk_norm is not None:
            pairs = zip(torch.split(qk, [self.heads, self.kv_heads], 1), self.qk_norm, strict=True)
            qk = torch.cat([F.rms_norm(x, weight.shape, weight, self.eps) for x, weight in pairs], 1)
        v = qkv[:, rotated:]
        if isinstance(attention, RotatingAttention):
            out = attention.attend_unrotated(index, qk, v, cos, sin, self.options)
        else:
            qk = torch.addcmul(qk * cos, qk.roll(qk.shape[2] // 2, 2), sin)
            out = attention.attend(index, qk[:, : self.heads], qk[:, self.heads :], v, self.options)
        return self.out(out.reshape(tokens, -1))

    def transform(self, x: Tensor, activate: Linear) -> Tensor:
        """What the norm and the MLP make of states x [T, hidden]: [T, hidden]. `activate`: mostly silu."""
        gate, up = self.gate_up(rms_norm(x, self.mlp_norm, self.eps)).chunk(2, -1)
        return self.down(activate(gate).mul_(up))


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions (arXiv 2104.09864, eq. 34); dimension i is paired with i + D/2."""

    inv_freq: Tensor  # [D / 2] float32
    scale: float

    @classmethod
    def of(cls, module: Any) -> Rope:
        """`module`: as transformers has it."""
        return cls(module.inv_freq.float(), module.attention_scaling)

    def turn(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Of positions [T]."""
        angles = positions[:, None, None].float() * self.inv_freq
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


class LeanModel:
    """Implements `gammaray.engine.attention.Model`. Consumes the model that it is built from."""

    def __init__(self, model: PreTrainedModel, pack: Pack = pack_linear, silu: Linear = F.silu) -> None:
        config, base = model.config, model.model
        self._eps: float = config.rms_norm_eps
        self._embedding: Tensor = base.embed_tokens.weight.detach()
        self._rope = Rope.of(base.rotary_emb)
        self._norm = doubled(base.norm)
        self._silu = silu
        self._head = pack(model.lm_head.weight.detach(), None)
        self._layers = [take_layer(base.layers[i], self._eps, pack) for i in range(config.num_hidden_layers)]

    @property
    def embeddings(self) -> Tensor:
        return self._embedding

    def first(self, layers: int, end: PreTrainedModel | None = None) -> LeanModel:
        """See `gammaray.engine.attention.LayeredModel`."""
        part = copy.copy(self)
        part._layers = self._layers[:layers]
        if end is not None:
            part._norm = doubled(end.model.norm)
            part._head = pack_linear(end.lm_head.weight.detach(), None)
        return part

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Attention, wanted: Tensor | None
    ) -> Tensor:
        return self._head_of(self._run(input_ids, positions, attention, None), wanted)

    def forward_features(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor,
        layers: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """See `gammaray.engine.hidden.FeatureModel`."""
        taps = Taps(layers)
        x = self._run(input_ids, positions, attention, taps)
        if (last := len(self._layers) + 1) in taps.layers:
            taps.see(last, rms_norm(x, self._norm, self._eps))
        return self._head_of(x, wanted), taps.features()

    def embed(self, input_ids: Tensor) -> Tensor:
        """See `gammaray.engine.hidden.FeatureModel`."""
        return F.embedding(input_ids, self._embedding)

    def head(self, states: Tensor) -> Tensor:
        """See `gammaray.engine.hidden.FeatureModel`."""
        return self._head.forward(states)

    def head_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `gammaray.engine.hidden.FeatureModel`."""
        return self._head.weight[tokens], None

    def _run(self, input_ids: Tensor, positions: Tensor, attention: Attention, taps: Taps | None) -> Tensor:
        """[T, hidden], before the final norm."""
        x = self.embed(input_ids)  # [T, hidden]
        rotation = self._rope.turn(positions, x.dtype)
        for index, layer in enumerate(self._layers):
            if taps is not None:
                taps.see(index, x)
            h = rms_norm(x, layer.input_norm, self._eps)
            x = x.add_(layer.attend(index, h, rotation, attention))
            x = x.add_(layer.transform(x, self._silu))
        if taps is not None:
            taps.see(len(self._layers), x)
        return x

    def _head_of(self, x: Tensor, wanted: Tensor | None) -> Tensor:
        if wanted is not None:
            x = x.index_select(0, wanted)
        if not x.shape[0]:
            return x.new_empty(0, self._embedding.shape[0])
        return self.head(rms_norm(x, self._norm, self._eps))


def has_lean_form(config: PreTrainedConfig) -> bool:
    """Whether `LeanModel` knows a model of this configuration."""
    return config.model_type in FAMILIES and getattr(config, "hidden_act", None) == "silu"


def rms_norm(x: Tensor, doubled: Tensor, eps: float) -> Tensor:
    """RMS norm of x [T, hidden] as one fused call; `doubled` [2 * hidden] holds the weights twice.

    torch has one on GPUs and takes ten calls on CPUs. (x, -x) has mean 0 and variance mean(x^2), so its layer
    norm is (n, -n) with n the RMS norm of x.
    """
    if not x.is_cpu:
        weight = doubled[: x.shape[1]]
        return F.rms_norm(x, weight.shape, weight, eps)
    both = torch.layer_norm(torch.cat([x, -x], 1), doubled.shape, doubled, None, eps)
    return both[:, : x.shape[1]]


def doubled(norm: Any) -> Tensor:
    """A norm's weights as `rms_norm` reads them."""
    return torch.cat([norm.weight.detach()] * 2)


def take_layer(layer: Any, eps: float, pack: Pack = pack_linear) -> LeanLayer:
    """Fuse and pack the weights of one Hugging Face layer, freeing the originals."""
    attention, mlp = layer.self_attn, layer.mlp
    size = attention.head_dim
    normed = hasattr(attention, "q_norm")
    window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return LeanLayer(
        heads=attention.q_proj.weight.shape[0] // size,
        kv_heads=attention.k_proj.weight.shape[0] // size,
        eps=eps,
        input_norm=doubled(layer.input_layernorm),
        qkv=_fuse(pack, attention.q_proj, attention.k_proj, attention.v_proj),
        qk_norm=(attention.q_norm.weight.detach(), attention.k_norm.weight.detach()) if normed else None,
        out=_output(pack, attention.o_proj),
        mlp_norm=doubled(layer.post_attention_layernorm),
        gate_up=_fuse(pack, mlp.gate_proj, mlp.up_proj),
        down=_output(pack, mlp.down_proj),
        options=AttentionOptions(attention.scaling, window),
    )


def _output(pack: Pack, linear: nn.Linear | RowwiseLinear) -> Linear:
    """What an attention or an MLP ends with: where ranks share it, their parts are summed."""
    if isinstance(linear, nn.Linear):
        return _fuse(pack, linear)
    pack_module(linear, pack)
    return linear.forward


def _fuse(pack: Pack, *linears: nn.Linear) -> Linear:
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biased = any(linear.bias is not None for linear in linears)
    bias = torch.cat([_bias(linear) for linear in linears]) if biased else None
    for linear in linears:
        linear.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return pack(weight, bias).forward


def _bias(linear: nn.Linear) -> Tensor:
    """[out]; zeros where others beside it have one."""
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
