"""What is timed: floors by hand, inputs that mean the same to all that are compared, no shape left out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from gammaray.kernels import tuning
from gammaray.kernels.bench import attention, check, command
from gammaray.kernels.bench.attention import Pools, Shape, paged, tree
from gammaray.kernels.bench.case import LLAMA_3_8B, Heads
from gammaray.kernels.reference import paged_tree_attention

CPU = torch.device("cpu")
SMALL = Heads("small", 4, 2, 16)


def test_bytes_and_operations_of_a_decode_step() -> None:
    """Llama-3-8B, 2 rows, 1023 + 1 keys: 8 heads of 128 in bfloat16, keys and values: 4 KiB a token."""
    shape = Shape(LLAMA_3_8B, 2, 1023, 1)
    assert shape.moved == 2 * (1024 * 4096 + 2 * 32 * 128 * 2)
    assert shape.operations == 2 * 1024 * 32 * 4 * 128


def test_a_tree_s_operations_count_ancestors_only() -> None:
    """Nodes 0; 1, 2; 3: depths 1, 2, 2, 3."""
    assert [mask.bit_count() for mask in tree(4)] == [1, 2, 2, 3]
    assert Shape(SMALL, 1, 10, 4).operations == (4 * 10 + 8) * 4 * 4 * 16


def test_every_promised_shape_is_there() -> None:
    cases = command.cases(CPU)
    assert sum(case.kernel == "attention" for case in cases) == 2 * 4 * 3 * 4
    assert sum(one.name == "flex_attention" for case in cases for one in case.comparisons) == 4
    assert max(case.memory for case in cases) < 100 * 2**30
    assert {case.kernel for case in cases} == {
        "attention",
        "merge",
        "move",
        "rope",
        "verification",
    }
    assert len({(case.kernel, case.shape) for case in cases}) == len(cases)
    goal = [case.sizes for case in cases if case.goal]
    assert len(goal) == 2 * 3 * 2 * 4
    assert all(int(sizes["batch"]) >= 8 and int(sizes["context"]) >= 8192 for sizes in goal)


def test_one_node_sees_every_key_and_sdpa_gets_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of zeros would keep SDPA from its fastest kernels, and flatter ours."""
    masks = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *_, attn_mask=None: masks.append(attn_mask))
    for nodes in (1, 8):
        attention._sdpa(Shape(SMALL, 2, 37, nodes), Pools(CPU, torch.float32))()
    assert [mask is None for mask in masks] == [True, False]


def test_on_a_gpu_every_tile_it_may_choose_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest is not launched below compute capability 9.0: a check that assumes less never runs it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    names = [planned.check for planned in check.checks(torch.device("cuda"))]
    assert len(set(names)) == len(names)
    for rows, group_rows in ((check.DECODE, 16), (check.TREES, 128)):
        case = tuning.Case("", 90, "bfloat16", 128, 4, group_rows)
        tiles = [check._text(tile) for tile in tuning.candidates(case)]
        of = [name for name in names if name.startswith(f"attention, 8B heads, rows of {rows.nodes} nodes")]
        assert [name.partition("tile ")[2] for name in of] == [tile.removeprefix("tile ") for tile in tiles]
    assert any(check._text(tuning.WIDE) in name for name in names)
    assert sum(name.startswith("verification, trees") for name in names) == 3 * 4 * 2


@pytest.mark.parametrize("nodes", [1, 8, 64])
def test_the_truth_of_a_row_and_both_comparisons_agree(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a mask or an order of heads wrong, another computation would be timed."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    shape, pools = Shape(SMALL, 2, 37, nodes), Pools(CPU, torch.float32)
    k, v = pools.of(shape)
    batch, q = paged(shape, CPU), pools.queries(shape)
    truth = paged_tree_attention(q, k, v, batch, scaling=0.25)
    assert attention._error(shape, batch, q, k, v, truth) < 1e-6
    assert attention._error(shape, batch, q, k, v, truth.roll(1, 1)) > 1e-2

    dense = Shape(SMALL, 2, 37, nodes)
    in_order = torch.arange(2 * shape.pages).view(2, -1)  # as the dense readers take the pool
    monkeypatch.setattr(torch, "randperm", lambda count, **_: in_order.flatten()[:count])
    truth = paged_tree_attention(q, k, v, paged(dense, CPU), scaling=0.25).view(2, nodes, 4, 16)
    folded = attention._sdpa(dense, pools)()
    assert isinstance(folded, torch.Tensor)
    folded = folded.view(2, 2, 2, nodes, 16).permute(0, 3, 1, 2, 4).flatten(2, 3)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    close(folded, truth)
    flexed = attention._flex(dense, pools)()
    assert isinstance(flexed, torch.Tensor)
    close(flexed.transpose(1, 2), truth)
