"""Finding call sizes that agree: the trial must notice another order of summation, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gammaray.engine.batch import Row, pack
from gammaray.kernels import cpu, invariant, paths
from gammaray.kernels.invariant import (
    NotInvariant,
    Sizes,
    by_rows,
    cancelling,
    check_elementwise,
    proven_rows,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = paths.AttentionSizes(Sizes((2, 4, 8, 16, 32, 64)), Sizes((64, 192, 512)))
X, W = cancelling(256, 24, 64, torch.float32)


def in_order(x: Tensor, parts: int = 1) -> Tensor:
    """x W^T, one term after the other within each of `parts` sums."""
    total = torch.zeros(len(x), len(W))
    for columns in torch.arange(x.shape[1]).chunk(parts):
        partial = torch.zeros(len(x), len(W))
        for i in columns:
            partial = partial + x[:, i : i + 1] * W[:, i]
        total = total + partial
    return total


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_rounding_is_left(dtype: torch.dtype) -> None:
    x, w = cancelling(40, 24, 65, dtype)
    assert x.dtype is w.dtype is dtype
    torch.testing.assert_close(x.double() @ w.double().T, torch.zeros(40, 24).double(), atol=1e-11, rtol=0)
    assert x.abs().max() > 8 * x.abs()[x != 0].median()  # sizes differ, else partial sums are exact too


def test_another_order_changes_nearly_every_result() -> None:
    assert (in_order(X) != in_order(X, parts=2)).float().mean() > 0.9


def test_sizes_that_sum_otherwise_are_dropped() -> None:
    proven = proven_rows(lambda x: in_order(x, parts=2 if len(x) in (4, 12) else 1), X, (2, 4, 8, 12, 16, 64))
    assert proven == Sizes((2, 8, 16, 64))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.cat([in_order(x[:5], 2), in_order(x[5:])]),  # the first rows go another way
        lambda x: in_order(x) + 1e-30 * x.sum(),  # rows leak into each other
    ],
)
def test_rows_that_depend_on_place_or_mates_are_refused(call: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotInvariant, match="the place of a row"):
        proven_rows(call, X)


def test_fitting_and_sharing_sizes() -> None:
    sizes = Sizes((4, 6, 32))
    assert [sizes.fit(n) for n in (1, 4, 5, 6, 7, 32)] == [4, 4, 6, 6, 32, 32]
    assert sizes.shared(Sizes((2, 6, 32))) == Sizes((6, 32))
    with pytest.raises(NotInvariant, match="none in common"):
        sizes.shared(Sizes((5,)))


def test_keys_are_padded_in_their_last_stride_only() -> None:
    assert [SIZES.keys(n) for n in (1, 64, 65, 193, 512, 513, 577, 1025)] == [
        64, 64, 192, 512, 512, 576, 704, 1088,
    ]  # fmt: skip


def test_what_computes_leftovers_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in DTYPES:
        check_elementwise(dtype)
    monkeypatch.setitem(invariant._ELEMENTWISE, "silu", F.silu)
    with pytest.raises(NotInvariant, match=r"silu in torch.float32 depends on where"):
        check_elementwise(torch.bfloat16)


@pytest.mark.parametrize("columns", [24, 700, 20_000])
@pytest.mark.parametrize("operation", [F.silu, F.gelu, torch.tanh])
def test_rows_of_elementwise_calls(operation: Callable[[Tensor], Tensor], columns: int) -> None:
    wide = torch.randn(200, 2 * columns, generator=torch.Generator().manual_seed(0))
    x = wide[:, :columns]
    alone = torch.cat([by_rows(operation, row[None]) for row in x])
    torch.testing.assert_close(alone, operation(x))
    for rows in (1, 2, 3, 47, 93, 94, 200):
        assert torch.equal(by_rows(operation, x[:rows]), alone[:rows])
        assert torch.equal(by_rows(operation, x[5 : 5 + rows].contiguous()), alone[5 : 5 + rows])


def test_a_tree_falls_apart_into_its_paths() -> None:
    tree = Row([1, 1, 1], 4, list(range(8)), [1] * 6, (-1, 0, -1, 2, 0, 3))
    chain = Row([1], 9, list(range(8, 16)), [1, 1], (-1, 0))
    batch = pack([tree, chain], 4).paged
    found = list(paths.split(batch, 64))
    assert found == [
        paths.Path(0, (0, 1, 2, 5, 6, 8), 0b101100, 10),  # pending, nodes 2, 3, 5
        paths.Path(0, (3, 7), 0b10001, 9),  # nodes 0, 4
        paths.Path(0, (4,), 0b11, 9),  # node 1, below node 0
        paths.Path(1, (9, 10, 11), 0b11, 12),
    ]
    slots = paths._slots(batch, found[:1], torch.arange(64), cpu.Layout(4, torch.float32, 1, None))
    assert slots[0, :12].tolist() == [0, 1, 2, 3, 4, 5, 6, 9, 10, 12, 0, 0]


def test_long_paths_are_cut() -> None:
    batch = pack([Row([1] * 9, 2, list(range(8)), [1], (-1,))], 4).paged
    found = list(paths.split(batch, 4))
    assert [(path.tokens, path.keys) for path in found] == [
        ((0, 1, 2, 3), 6),
        ((4, 5, 6, 7), 10),
        ((8, 9), 12),
    ]
    slots = paths._slots(batch, found[:1], torch.arange(8), cpu.Layout(4, torch.float32, 1, None))
    assert slots[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 8), (3, 3, 16), (9, 3, 64)])
def test_attention_finds_sizes(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    sizes = paths.prove(heads, kv_heads, dim, dtype)
    assert sizes.tail.most == paths.STRIDE
    assert sizes.queries.most == max(paths.QUERIES)
