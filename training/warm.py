"""A head that begins with a layer of its target: it need not learn anew what the target's states are like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gammaray.engine.hf import decoder_layers
from gammaray.training.eagle3_module import HeadModule

WIDE = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


@torch.no_grad()
def begin_with(module: HeadModule, target: PreTrainedModel) -> None:
    """Take over the target's last layer and its final norm, as far as their sizes are the head's.

    Drafts begin with the last of the states that the head reads, as they are. What the embedding adds to
    queries, keys and values stays as it was drawn. Raises ModelUnsupported for a target whose layers are in
    no list.
    """
    hidden = module.fc.out_features
    given = dict(decoder_layers(target)[-1].named_parameters())
    for name, own in module.midlayer.named_parameters():
        if name in WIDE and name in given and given[name].shape == own[:, hidden:].shape:
            own[:, hidden:] = given[name]
        elif name in given and given[name].shape == own.shape and name != "input_layernorm.weight":
            own.copy_(given[name])
    _take(module.midlayer.hidden_norm, given.get("input_layernorm.weight"))
    _take(module.norm, getattr(_final_norm(target), "weight", None))
    module.fc.weight.zero_()
    module.fc.weight[:, -hidden:] = module.scale[-hidden:].diag()


def _take(norm: nn.RMSNorm, weight: Tensor | None) -> None:
    if weight is not None and weight.shape == norm.weight.shape:
        norm.weight.copy_(weight)


def _final_norm(target: Any) -> Any:
    base = getattr(target, target.base_model_prefix, target)
    return getattr(base, "norm", None)
