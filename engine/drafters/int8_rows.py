"""Matrices in 8 bits a weight, as a checkpoint stores them: a scale a row, as compressed-tensors writes them.

`{key}` is int8 [N, K] and `{key}_scale` [N, 1] or [N]; a weight is the product of both. They are made plain
when they are read, so that no drafter knows of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gammaray.errors import ConfigError

SCALE = "_scale"
LARGEST = 127  # -128 is not used, so that a row is symmetric


def packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with each floating matrix [N, K] as the nearest of 255 steps a row, everything else as it is.

    A weight moves by at most half a step, which is its row's largest over 254.
    """
    found: dict[str, Tensor] = {}
    for key, x in tensors.items():
        if x.dim() != 2 or not x.is_floating_point():
            found[key] = x
            continue
        wide = x.float()
        scale = wide.abs().amax(1, keepdim=True) / LARGEST  # [N, 1]
        steps = wide / scale.clamp_min(torch.finfo(torch.float32).tiny)
        found |= {key: steps.round().to(torch.int8), f"{key}{SCALE}": scale}
    return found


def plain(tensors: dict[str, Tensor], place: object) -> dict[str, Tensor]:
    """The same with each such matrix in float32. Raises ConfigError for one without a scale for each row."""
    found = dict(tensors)
    for key in [key for key, x in tensors.items() if x.dtype == torch.int8]:
        x, scale = found[key], found.pop(f"{key}{SCALE}", None)
        if x.dim() != 2 or scale is None or scale.shape not in ((len(x),), (len(x), 1)):
            shape = "not there" if scale is None else f"of shape {list(scale.shape)}"
            raise ConfigError(
                f"{place}: {key} is int8 {list(x.shape)}, and {key}{SCALE}, which must hold a scale for each "
                f"of its rows, is {shape}: store both, or 16 bits a weight"
            )
        found[key] = x * scale.float().view(-1, 1)
    return found
