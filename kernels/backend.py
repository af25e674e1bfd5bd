"""Which backend answers for tensors of a device: Triton kernels, or plain torch."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Literal

import torch

from gammaray.errors import ConfigError

VARIABLE = "GAMMARAY_KERNELS"
Backend = Literal["fused", "torch"]


def backend(device: torch.device) -> Backend:
    """ "fused" on CUDA, else "torch"; GAMMARAY_KERNELS decides otherwise. On a CPU "fused" is interpreted.

    Raises ConfigError for a value that is none, and where Triton is needed and missing.
    """
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in ("auto", "fused", "torch"):
        raise ConfigError(f"{VARIABLE} is {wanted!r}, use one of: auto, fused, torch")
    if wanted == "torch" or (wanted == "auto" and device.type != "cuda"):
        return "torch"
    _require_triton()
    return "fused"


def _require_triton() -> None:
    if find_spec("triton") is None:
        raise ConfigError(
            f"fused kernels need Triton: pip install 'gammaray[gpu]', or set {VARIABLE}=torch to do without"
        )
