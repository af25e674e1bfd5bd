"""One way to compile a kernel, so that all of them can be compiled, and counted, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """`kernel` is what `triton.jit` made of a function; see `triton.compiler.ASTSource` for the rest."""

    name: str  # of the kernel and the shape, for a table
    kernel: Any
    signature: Mapping[str, str]  # argument -> Triton type: "*bf16", "*i64", "i32", "fp32"
    constants: Mapping[str, Any]  # tl.constexpr arguments
    warps: int = 4
    stages: int = 2
    registers: int | None = None  # of a thread, at most; None: ptxas weighs spills against occupancy
    since: int = 80  # the compute capability, times ten, from which on it is launched
