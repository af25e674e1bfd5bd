"""The header of a safetensors file: tensor shapes, without the weights.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path


def read_header(file: Path) -> tuple[int, int]:
    """(number of weights, their bytes): an 8-byte length, then JSON. A broken file may raise any error."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > file.stat().st_size - 8:
            raise ValueError(f"{file.name} is no safetensors file, or not whole: is it a Git LFS pointer?")
        header = json.loads(opened.read(length))
    tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
    stored = sum(tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in tensors)
    return sum(int(math.prod(tensor["shape"])) for tensor in tensors), int(stored)
