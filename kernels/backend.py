"""Which backend answers for tensors of a device: Triton kernels, or plain torch."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Literal

import torch

from gammaray.errors import ConfigError

VARIABLE = "GAMMARAY_KERNELS"
INTERPRET = "TRITON_INTERPRET"  # read by Triton when kernels are imported
Backend = Literal["fused", "torch"]


def backend(device: torch.device) -> Backend:
    """Triton on CUDA, torch elsewhere; GAMMARAY_KERNELS decides otherwise.

    Raises ConfigError for a value that is none, where Triton is missing, and on a CPU unless it interprets.
    """
    wanted = os.environ.get(VARIABLE) or "auto"
    if wanted not in ("auto", "fused", "torch"):
        raise ConfigError(f"{VARIABLE} is {wanted!r}, use one of: auto, fused, torch")
    if wanted == "torch" or (wanted == "auto" and device.type != "cuda"):
        return "torch"
    if find_spec("triton") is None:
        raise ConfigError(
            f"fused kernels need Triton: pip install 'gammaray[gpu]', or set {VARIABLE}=torch to do without"
        )
    if device.type == "cpu" and os.environ.get(INTERPRET) != "1":
        raise ConfigError(f"{VARIABLE}=fused needs a GPU; tests set {INTERPRET}=1, too, and do without one")
    return "fused"
