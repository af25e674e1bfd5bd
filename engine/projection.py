"""A few numbers a token that keep what a model's embeddings mean, for the acceptance predictor's features."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROWS = 4096  # that are widened to float32 at a time


@torch.inference_mode()
def projection(embeddings: Tensor, dims: int = 8, seed: int = 0) -> NDArray[np.float16]:
    """Input embeddings [V, H] on `dims` random orthonormal directions: [V, dims], each column of mean 0, the
    standard deviation of all 1.

    Distances between tokens survive a random projection (Johnson and Lindenstrauss 1984). The same seed gives
    the same directions to every replica. Raises ValueError for more directions than H.
    """
    hidden = embeddings.shape[1]
    if dims > hidden:
        raise ValueError(f"embeddings of {hidden} numbers have no {dims} orthogonal directions")
    drawn = torch.randn(hidden, dims, generator=torch.Generator().manual_seed(seed))
    directions = torch.linalg.qr(drawn).Q.to(embeddings.device)  # [H, dims]
    table = torch.cat([part.float() @ directions for part in embeddings.split(ROWS)])
    table -= table.mean(0)
    table /= table.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    narrow: NDArray[np.float16] = table.half().cpu().numpy()
    return narrow
