"""The header of a safetensors file: tensor shapes, without the weights.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import NamedTuple


class Tensor(NamedTuple):
    elements: int
    stored: int  # bytes


def read_header(file: Path) -> tuple[int, int]:
    """(number of weights, their bytes). A broken file may raise any error."""
    tensors = read_tensors(file).values()
    return sum(tensor.elements for tensor in tensors), sum(tensor.stored for tensor in tensors)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """By name: an 8-byte length, then JSON. A broken file may raise any error."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > file.stat().st_size - 8:
            raise ValueError(f"{file.name} is no safetensors file, or not whole: is it a Git LFS pointer?")
        header = json.loads(opened.read(length))
    return {
        name: Tensor(int(math.prod(one["shape"])), int(one["data_offsets"][1] - one["data_offsets"][0]))
        for name, one in header.items()
        if name != "__metadata__"
    }
