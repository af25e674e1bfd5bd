"""Tensors of a draft head's checkpoint, each taken by name, so that none is missing or overlooked."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gammaray.engine.drafters.head_loading import listed
from gammaray.errors import ConfigError


class Weights:
    """Tensors of one checkpoint. What `take` and `find` return is of one dtype and on one device."""

    def __init__(
        self, place: str, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.place = place  # for messages
        self._left = dict(tensors)
        self._dtype = dtype
        self.device = device

    def take(self, key: str, *shape: int) -> Tensor:
        """Raises ConfigError where it is missing, or of another shape."""
        if (tensor := self.find(key, *shape)) is None:
            raise ConfigError(f"{self.place}: no tensor {key!r}; {self._there()}")
        return tensor

    def find(self, key: str, *shape: int) -> Tensor | None:
        """None where it is missing. Raises ConfigError where it has another shape."""
        if (tensor := self._left.pop(key, None)) is None:
            return None
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"{self.place}: {key} is {list(tensor.shape)}, expected {list(shape)}")
        kept = tensor.dtype if not tensor.is_floating_point() else self._dtype
        return tensor.detach().to(self.device, kept)

    def finish(self, unused: Iterable[str] = ()) -> None:
        """Raises ConfigError where a tensor was not taken: it would have changed what the checkpoint says."""
        if left := set(self._left) - set(unused):
            raise ConfigError(f"{self.place}: unknown tensors {listed(left)}")

    def _there(self) -> str:
        return f"it has {listed(self._left)} besides" if self._left else "it has no others"
