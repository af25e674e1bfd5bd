"""One thing the kernel benchmark times, and what is made of its time. Pure: no device is touched here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention of a model, one layer."""

    model: str
    query: int
    key: int
    size: int  # numbers a head

    @property
    def group(self) -> int:
        return self.query // self.key


LLAMA_3_8B = Heads("Llama-3-8B", 32, 8, 128)
LLAMA_3_70B = Heads("Llama-3-70B", 64, 8, 128)
BF16 = 2  # bytes
LARGE_BATCH, LARGE_CONTEXT = 8, 8192  # from which on attention is to reach its goals
SEED = 6  # of all that is random: each check and each row begins with it


@dataclass(frozen=True, slots=True)
class Roofs:
    """What this device reaches in large simple operations, measured; per microsecond."""

    copied: float  # bytes read plus bytes written by a copy
    operations: float  # of a bfloat16 matrix product, two a multiply-add


@dataclass(frozen=True, slots=True)
class Ready:
    """A case whose tensors are there."""

    run: Callable[[], Tensor]
    error: Callable[[Tensor], float]  # of what `run` returned, by the largest number of the truth


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same work, done by something else."""

    name: str
    seconds: float  # to prepare and compile it, about
    prepare: Callable[[], Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Case:
    kernel: str
    sizes: Mapping[str, str | int]
    moved: int  # bytes that must be read or written at least
    operations: int  # of matrix products
    memory: int  # bytes of device memory that its tensors take
    tolerance: float  # of `Ready.error`
    prepare: Callable[[], Ready]
    comparisons: tuple[Comparison, ...] = ()
    seconds: float = 3.0  # that it may take, compilation included
    goal: bool = False  # a goal is about it: its comparisons follow at once, all others at the end

    @property
    def shape(self) -> str:
        return " ".join(v if isinstance(v, str) else f"{name} {v}" for name, v in self.sizes.items())


@dataclass(frozen=True, slots=True)
class Row:
    """`us`: median microseconds of one call."""

    case: Case
    us: float
    error: float
    roofs: Roofs
    others: dict[str, float] = field(default_factory=dict)  # comparison -> us

    @property
    def floor_us(self) -> float:
        """The time in which a copy moves as many bytes."""
        return self.case.moved / self.roofs.copied

    @property
    def bandwidth(self) -> float:
        """Share of the copy bandwidth that was reached."""
        return self.floor_us / self.us

    @property
    def peak(self) -> float:
        """Share of the bfloat16 peak that was reached."""
        return self.case.operations / self.roofs.operations / self.us

    @property
    def correct(self) -> bool:
        return self.error <= self.case.tolerance  # False for NaN

    def as_json(self) -> dict[str, object]:
        return {
            "kernel": self.case.kernel,
            "shape": self.case.shape,
            **self.case.sizes,
            "us": round(self.us, 2),
            "floor_us": round(self.floor_us, 2),
            "ratio_to_floor": round(self.us / self.floor_us, 3),
            "share_of_bf16_peak": round(self.peak, 3),
            "max_rel_err": finite(self.error),
            **{f"{name}_us": round(us, 2) for name, us in self.others.items()},
        }


def finite(error: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return error if math.isfinite(error) else None


@dataclass(frozen=True, slots=True)
class Skipped:
    what: str
    reason: str
