"""The header of a GGUF file: metadata and tensor shapes, without the weights.

The reader of the package `gguf` makes an object of each of the tokenizer's strings, which takes seconds.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

from gammaray.errors import ConfigError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
LONGEST = 2**24  # bytes of a string; chat templates, the longest, have some thousands
WRONG = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)
BROKEN = (OSError, struct.error, *WRONG)  # whatever reading a file that is not as it should be may raise
Value = int | float | bool | str | None


def read_header(path: Path) -> tuple[dict[str, Value], int]:
    """(metadata, number of weights). Arrays are None. Raises ConfigError when it is no GGUF file."""
    try:
        with path.open("rb") as file:
            return _header(file)
    except BROKEN as error:
        raise ConfigError(f"cannot read {path}, is it a GGUF file of version 2 or 3? ({error})") from None


def _header(file: BinaryIO) -> tuple[dict[str, Value], int]:
    if file.read(4) != b"GGUF" or _one(file, "I") not in (2, 3):
        raise ValueError("it does not begin as one")
    tensors, pairs = int(_one(file, "Q")), int(_one(file, "Q"))
    fields = {_string(file): _value(file, int(_one(file, "I"))) for _ in range(pairs)}
    return fields, sum(_elements(file) for _ in range(tensors))


def _elements(file: BinaryIO) -> int:
    """Of one tensor: name, dimensions, type, offset."""
    _string(file)
    rank = int(_one(file, "I"))
    shape = [int(_one(file, "Q")) for _ in range(rank)]
    file.seek(4 + 8, 1)
    return math.prod(shape)


def _value(file: BinaryIO, kind: int) -> Value:
    if kind == STRING:
        return _string(file)
    if kind != ARRAY:
        return _one(file, SCALARS[kind])
    kind, length = int(_one(file, "I")), int(_one(file, "Q"))
    if kind in SCALARS:
        file.seek(struct.calcsize(SCALARS[kind]) * length, 1)
        return None
    for _ in range(length):
        if kind == STRING:
            file.seek(int(_one(file, "Q")), 1)
        else:
            _value(file, kind)
    return None


def _string(file: BinaryIO) -> str:
    length = int(_one(file, "Q"))
    if length > LONGEST:
        raise ValueError(f"a string of {length} bytes")
    return file.read(length).decode()


def _one(file: BinaryIO, form: str) -> int | float | bool:
    value: int | float | bool = struct.unpack("<" + form, file.read(struct.calcsize("<" + form)))[0]
    return value
