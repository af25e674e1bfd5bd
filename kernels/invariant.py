"""Which sizes a call may have without changing a single bit of any row's result, found by trial.

A library adds up the terms of a matrix product in an order that it picks by the sizes of the call, so a row's
rounding depends on who shares the call. Sizes that agree can be told from those that do not: on inputs whose
terms cancel exactly nothing but rounding is left, and it differs wherever the order does. Calls are then
padded to a size that agreed (He et al., "Defeating Nondeterminism in LLM Inference", 2025, fix the tile
instead; on CPUs most sizes agree, so little padding is needed).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# Fewer than 4 rows are never cheaper: measured with oneDNN, 4 to 6 cost less than 1.
ROWS = (*range(4, 32), *range(32, 64, 2), *range(64, 128, 16), *range(128, 257, 32))
REFERENCE = 16  # rows of the call that the others must agree with
SERIAL = 2**15 - 1  # elements up to which torch does not split an elementwise call among threads


class NotInvariant(ValueError):
    """A row's bits depend on its place or on its batch mates, whatever the size of the call."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that agree, ascending."""

    proven: tuple[int, ...]

    @property
    def most(self) -> int:
        return self.proven[-1]

    def fit(self, n: int) -> int:
        """The smallest proven size that holds `n`, which is at most `most`."""
        return self.proven[bisect_left(self.proven, n)]

    def shared(self, other: Sizes) -> Sizes:
        """What is proven here and there. Raises NotInvariant where that is nothing."""
        shared = tuple(n for n in self.proven if n in other.proven)
        if not shared:
            raise NotInvariant(f"sizes {self.proven} and {other.proven} have none in common")
        return Sizes(shared)


def proven_rows(call: Callable[[Tensor], Tensor], x: Tensor, candidates: Iterable[int] = ROWS) -> Sizes:
    """The row counts with which `call` gives each row of x [N, ...] the bits of a call with `REFERENCE` rows.

    N is at least the largest candidate. Raises NotInvariant when a row's place or its mates matter even
    there.
    """
    first = call(x[:REFERENCE])
    expected = torch.cat([first, *(call(part) for part in x[REFERENCE:].split(REFERENCE))])
    for shift in range(1, REFERENCE):
        mixed = torch.cat([x[:shift], x[-(REFERENCE - shift) :]]).roll(shift, 0)
        wanted = torch.cat([expected[:shift], expected[-(REFERENCE - shift) :]]).roll(shift, 0)
        if not torch.equal(call(mixed), wanted):
            raise NotInvariant(f"the place of a row among {REFERENCE} changes its bits")
    at = 0
    proven = []
    for n in candidates:
        at = at if at + n <= len(x) else 0
        if torch.equal(call(x[at : at + n].clone()), expected[at : at + n]):
            proven.append(n)
        at += n
    if not proven:
        raise NotInvariant("no two row counts agree")
    return Sizes(tuple(proven))


def cancelling(rows: int, columns: int, terms: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [rows, terms] and w [columns, terms] of which x w^T is 0 but for the rounding of its partial sums."""
    generator = torch.Generator().manual_seed(0)
    half = terms // 2
    order = torch.randperm(terms, generator=generator)
    x, w = torch.zeros(rows, terms, dtype=dtype), torch.zeros(columns, terms, dtype=dtype)
    factors = (1 + torch.rand(columns, half, generator=generator)).to(dtype)
    values = (torch.randn(rows, half, generator=generator) * _scales((rows, half), generator)).to(dtype)
    w[:, order[:half]], w[:, order[half : 2 * half]] = factors, factors
    x[:, order[:half]], x[:, order[half : 2 * half]] = values, -values
    return x, w


def check_elementwise(dtype: torch.dtype) -> None:
    """Raises NotInvariant unless RoPE and the sampler's noise compute an element alike wherever it lies.

    torch computes what is left over at the end of a run one by one, with another routine; for these
    operations both are the same function.
    """
    x = 4 * torch.rand(4099, generator=torch.Generator().manual_seed(0)) + 2.0**-20
    for name, operation in _ELEMENTWISE.items():
        for values in (x, x.to(dtype)):
            whole = operation(values)
            for length in (1, 7, 37, 1000):
                if not torch.equal(torch.cat([operation(part) for part in values.split(length)]), whole):
                    raise NotInvariant(f"{name} in {values.dtype} depends on where an element lies")


def by_rows(operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise operation on x [T, C], with each row computed alike however many there are.

    At least two rows that lie apart make a run of each row; no call is so large that threads split a row.
    """
    rows, columns = x.shape
    if 2 * columns > SERIAL:
        return torch.cat([operation(row) for row in x.contiguous().split(1)])
    most = SERIAL // columns
    single = rows % most == 1
    if single or x.stride(0) == columns:
        apart = x.new_zeros(rows + single, columns + 1)[:, :columns]
        apart[:rows] = x
        x = apart
    parts = [operation(part) for part in x.split(most)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:rows]


_ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "addcmul": lambda x: torch.addcmul(1.7 * x, 0.3 * x, 1.1 * x),
    "cos": torch.cos,
    "sin": torch.sin,
    "log": torch.log,
    "log1p": torch.log1p,
}


def _scales(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return 4.0 ** torch.randint(-3, 4, shape, generator=generator)
