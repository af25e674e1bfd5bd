"""What a model computes on, and in which numbers."""

from __future__ import annotations

import torch

from gammaray.errors import ConfigError
from gammaray.kernels.backend import backend

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """For "auto" the first GPU that this process sees, else the CPU. Raises ConfigError."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")  # what is no device at all is refused like one that is no good
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {str(device)!r} is not supported, use one of: auto, cpu, cuda")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {str(device)!r}: this process sees no GPU that torch can use")
    return torch.device("cuda", 0) if found == torch.device("cuda") else found


def check_combination(device: torch.device, deterministic: bool, ranks: int) -> None:
    """Raises ConfigError for what does not work together."""
    if deterministic and ranks > 1:
        raise ConfigError("deterministic does not work with tensor_parallel yet: leave one of them out")
    asked = "deterministic" if deterministic else "tensor_parallel" if ranks > 1 else ""
    if asked and device.type != "cpu":
        raise ConfigError(
            f"{asked} works on CPUs only: leave it out, or hide the GPUs with CUDA_VISIBLE_DEVICES="
        )


def check_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError where `backend` does, and for numbers that kernels would get wrong."""
    if backend(device) == "fused" and device.type == "cpu" and dtype == torch.bfloat16:
        raise ConfigError("Triton's interpreter computes bfloat16 wrongly: set dtype: float32")


def resolve_dtype(dtype: str | torch.dtype, device: torch.device = CPU) -> torch.dtype:
    """For "auto" bfloat16 where the device computes with it, else float16 on a GPU and float32 on a CPU."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
        # The operator is missing where torch was built without oneDNN.
        supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
        fast = torch.backends.mkldnn.is_available() and supported()
        return torch.bfloat16 if fast else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}, use one of: auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]
