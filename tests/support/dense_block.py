"""The whole block drafter over one sequence, dense and without pages, written from the papers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from support import block_heads
from support.heads import Tensors


@torch.no_grad()
def states(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Of the target after 1 and 3 layers, [T, 2 * H]."""
    found = model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([found[1][0], found[3][0]], -1)


class Reference:
    """Reads the tensors of a public checkpoint."""

    def __init__(self, model: PreTrainedModel, settings: dict[str, Any], tensors: Tensors) -> None:
        self.model, self.settings, self.tensors = model, settings, tensors
        inner = settings.get("transformer_layer_config", settings)
        self.vocab = model.config.vocab_size
        self.layers, self.heads = inner["num_hidden_layers"], inner["num_attention_heads"]

    def rms(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.tensors[f"{name}.weight"]

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """[T, heads, D], pairs (i, i + D / 2) turned as complex numbers."""
        half = x.shape[-1] // 2
        angles = positions[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)

    def hidden(self, tokens: list[int]) -> Tensor:
        """[B, H] behind the last norm, of all places."""
        tensors, size = self.tensors, self.settings["block_size"]
        embed = self.model.get_input_embeddings().weight
        context = self.rms(states(self.model, tokens)[:-1] @ tensors["fc.weight"].T, "hidden_norm")
        x = embed[[tokens[-1], *[self.settings["mask_token_id"]] * (size - 1)]]
        positions = torch.arange(len(tokens) - 1 + size).float()
        for i in range(self.layers):
            name = f"layers.{i}.self_attn"
            own = self.rms(x, f"layers.{i}.input_layernorm")
            q, k, v = (
                (given @ tensors[f"{name}.{part}_proj.weight"].T).unflatten(-1, (-1, block_heads.HEAD_DIM))
                for part, given in (
                    ("q", own),
                    ("k", torch.cat([context, own])),
                    ("v", torch.cat([context, own])),
                )
            )
            q = self.rotated(self.rms(q, f"{name}.q_norm"), positions[-size:])
            k = self.rotated(self.rms(k, f"{name}.k_norm"), positions)
            k, v = (each.repeat_interleave(self.heads // each.shape[1], 1) for each in (k, v))
            scores = torch.einsum("ihd,jhd->hij", q, k) / block_heads.HEAD_DIM**0.5  # nothing is masked
            mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
            x = x + mixed @ tensors[f"{name}.o_proj.weight"].T
            own, mlp = self.rms(x, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp"
            gated = F.silu(own @ tensors[f"{mlp}.gate_proj.weight"].T) * (
                own @ tensors[f"{mlp}.up_proj.weight"].T
            )
            x = x + gated @ tensors[f"{mlp}.down_proj.weight"].T
        return self.rms(x, "norm")

    @torch.no_grad()
    def __call__(self, tokens: list[int], drafted: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """q [K, V] of each place given what was drafted before it, and the confidences [K]."""
        tensors, hidden = self.tensors, self.hidden(tokens)[-self.places() :]
        logits = hidden @ tensors.get("lm_head.weight", self.model.get_output_embeddings().weight).T
        previous = [tokens[-1], *drafted[:-1]]
        rows, sure, state = [], [], torch.zeros(block_heads.RANK)
        for place, token in enumerate(previous):
            h, read = hidden[place], hidden[place]
            row = logits[place]
            if "markov_head.markov_w1.weight" in tensors:
                e = tensors["markov_head.markov_w1.weight"][token]
                z, state = self.mixed(e, h, state)
                row = row + tensors["markov_head.markov_w2.weight"] @ z
                read = torch.cat([h, e]) if self.settings.get("confidence_head_with_markov", True) else h
            rows.append(row.softmax(-1))
            if "confidence_head.proj.weight" in tensors:
                proj = (
                    tensors["confidence_head.proj.weight"][0] @ read + tensors["confidence_head.proj.bias"][0]
                )
                sure.append(proj.sigmoid())
            else:
                sure.append(rows[-1].square().sum())
        q = torch.zeros(len(rows), self.vocab)
        ids = torch.arange(len(rows[0])) + tensors.get("d2t", torch.zeros(len(rows[0]), dtype=torch.int64))
        q[:, ids] = torch.stack(rows)
        return q, torch.stack(sure)

    def mixed(self, e: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        def linear(name: str, x: Tensor) -> Tensor:
            return self.tensors[f"markov_head.{name}.weight"] @ x + self.tensors[f"markov_head.{name}.bias"]

        kind = self.settings["markov_head_type"]
        if kind == "vanilla":
            return e, state
        if kind == "gated":
            return linear("gate_proj", torch.cat([h, e])).sigmoid() * e, state
        g, c, o = linear("joint_proj", torch.cat([state, e, h])).chunk(3)
        return o.tanh(), g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh()

    def places(self) -> int:
        kind, size = self.settings.get("speculators_model_type"), self.settings["block_size"]
        return int(size) if self.settings.get("sample_from_anchor", kind != "dflash") else int(size) - 1
