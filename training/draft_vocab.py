"""Which tokens a head can draft: the ones that the target writes, most of what it says being few of them.

FR-Spec (arXiv 2502.14856) and EAGLE-3 do so because a projection to the whole vocabulary is most of a small
head's time. A token that is not in there is never drafted; the target writes it all the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gammaray.errors import ConfigError


def choose(counts: Tensor, size: int) -> Tensor:
    """The `size` tokens that were written most often, in ascending order: [Vd] int64.

    `counts` [V]. Of equally frequent ones the lower come first, which in a BPE vocabulary were merged first,
    and so are the more common. Raises ConfigError for a size that is none, or more than there are.
    """
    if not 0 < size <= len(counts):
        raise ConfigError(f"a draft vocabulary of {size} of {len(counts)} tokens: give another size")
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def coverage(counts: Tensor, tokens: Tensor) -> float:
    """The share of what was written that can be drafted."""
    return float(counts[tokens].sum() / counts.sum().clamp(min=1))
