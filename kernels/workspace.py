"""Memory for the partial results of split attention."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """One step's: its layers run one after the other, so they share it. Taken when first needed.

    A step that is being captured thus takes it from the graph's own memory, which lives as long as the graph.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of this shape, with any content."""
        size = torch.Size(shape).numel()
        if self._memory is None or self._memory.dtype != dtype or len(self._memory) < size:
            self._memory = torch.empty(size, dtype=dtype, device=device)
        return self._memory[:size].view(shape)
