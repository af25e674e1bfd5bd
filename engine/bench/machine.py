"""On what something was measured."""

from __future__ import annotations

import platform

import psutil
import torch


def machine() -> dict[str, object]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": round(psutil.getloadavg()[0], 1),  # of the last minute
    }
