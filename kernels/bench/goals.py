"""What the kernels are to reach on an H200, and whether measured rows reach it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gammaray.kernels.bench.case import LARGE_BATCH, LARGE_CONTEXT, Row

MEMORY_BOUND = (
    64  # query rows a key head (nodes x group) up to which verification should cost what decoding does
)
BANDWIDTH, PEAK = 0.80, 0.55  # shares
VERIFY, LOGITS = 1.25, 1.3  # times decoding; times one read of the logits
SMALL_US = 30.0


@dataclass(frozen=True, slots=True)
class Goal:
    """Judged on the rows it is about; without any it is neither met nor missed."""

    goal: str
    met: int
    judged: int
    worst: str  # shape and value
    note: str = ""

    @property
    def verdict(self) -> str:
        return "not measured" if not self.judged else "met" if self.met == self.judged else "missed"


@dataclass(frozen=True, slots=True)
class _Judged:
    row: Row
    value: float
    limit: float
    more_is_better: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.more_is_better else self.value <= self.limit

    @property
    def margin(self) -> float:
        return self.value / self.limit if self.more_is_better else self.limit / self.value


def goals(rows: Sequence[Row]) -> list[Goal]:
    attention = [row for row in rows if row.case.kernel == "attention"]
    beyond = [row for row in attention if _query_rows(row) > MEMORY_BOUND]
    reachable = [row for row in beyond if _reachable(row)]
    ruled_out = len(beyond) - len(reachable)
    return [
        _goal(
            "attention: >= 80 % of copy bandwidth, batch >= 8, context >= 8k, nodes x group <= 64",
            [_Judged(row, row.bandwidth, BANDWIDTH, True) for row in attention if _large(row)],
        ),
        _goal(
            "attention: verify <= 1.25 x one-token decode, nodes x group <= 64", [*_against_decode(attention)]
        ),
        _goal(
            "attention: >= 55 % of bf16 peak, nodes x group > 64",
            [_Judged(row, row.peak, PEAK, True) for row in reachable],
            f"{ruled_out} more rows read so much that no kernel can" if ruled_out else "",
        ),
        _goal("verification: <= 30 us, batch 1, 8 nodes", [*_verification(rows, 1, lambda _: SMALL_US)]),
        _goal(
            "verification: <= 1.3 x one read of the logits, batch 64",
            [*_verification(rows, 64, lambda row: LOGITS * row.floor_us)],
        ),
    ]


def _goal(text: str, judged: Sequence[_Judged], note: str = "") -> Goal:
    worst = min(judged, key=lambda one: one.margin, default=None)
    said = f"{worst.row.case.shape}: {worst.value:.3g}" if worst else ""
    return Goal(text, sum(one.met for one in judged), len(judged), said, note)


def _query_rows(row: Row) -> int:
    return int(row.case.sizes["nodes"]) * int(row.case.sizes["group"])


def _large(row: Row) -> bool:
    sizes = row.case.sizes
    large = int(sizes["batch"]) >= LARGE_BATCH and int(sizes["context"]) >= LARGE_CONTEXT
    return large and _query_rows(row) <= MEMORY_BOUND


def _reachable(row: Row) -> bool:
    """False where moving the bytes alone takes longer than the goal allows."""
    return row.floor_us <= row.case.operations / row.roofs.operations / PEAK


def _against_decode(rows: Sequence[Row]) -> Iterator[_Judged]:
    """Rows with several nodes against the row with one and the same rest."""
    decode = {_rest(row): row.us for row in rows if row.case.sizes["nodes"] == 1}
    for row in rows:
        if int(row.case.sizes["nodes"]) > 1 and _query_rows(row) <= MEMORY_BOUND and _rest(row) in decode:
            yield _Judged(row, row.us / decode[_rest(row)], VERIFY)


def _rest(row: Row) -> tuple[object, ...]:
    return tuple(row.case.sizes[name] for name in ("model", "batch", "context"))


def _verification(rows: Sequence[Row], batch: int, limit_us: Callable[[Row], float]) -> Iterator[_Judged]:
    for row in rows:
        sizes = row.case.sizes
        if (row.case.kernel, sizes.get("batch"), sizes.get("nodes")) == ("verification", batch, 8):
            yield _Judged(row, row.us, limit_us(row))
