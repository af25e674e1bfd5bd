"""Correctness before speed: fused kernels against the truth on small random inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, product

import torch
from torch import Tensor

from gammaray.kernels import reference, tuning
from gammaray.kernels.api import PagedBatch
from gammaray.kernels.bench import drafts, joining, moves, verification
from gammaray.kernels.bench.attention import tree
from gammaray.kernels.bench.case import SEED, Case, Heads, finite
from gammaray.kernels.tuning import Tile
from gammaray.kernels.workspace import Workspace

PAGE = 16
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TINY = Heads("tiny", 6, 2, 16)
LIKE_8B, LIKE_70B = Heads("8B", 8, 2, 128), Heads("70B", 16, 2, 128)  # the same group and size, fewer heads


@dataclass(frozen=True, slots=True)
class Check:
    check: str
    error: float  # the largest, by the largest number of the truth
    tolerance: float
    problem: str = ""  # what was raised

    @property
    def ok(self) -> bool:
        return not self.problem and self.error <= self.tolerance

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"error": finite(self.error), "ok": self.ok}


@dataclass(frozen=True, slots=True)
class Planned:
    """A check that has not run."""

    check: str
    tolerance: float
    error: Callable[[], float]

    def run(self) -> Check:
        torch.manual_seed(SEED)
        try:
            return Check(self.check, self.error(), self.tolerance)
        except Exception as problem:  # of a kernel, of any kind: a failed check, and the others still run
            return Check(self.check, float("inf"), self.tolerance, f"{type(problem).__name__}: {problem}")


@dataclass(frozen=True, slots=True)
class Rows:
    """Of one step: committed tokens and tree nodes of each."""

    contexts: tuple[int, ...]
    nodes: tuple[int, ...]


DECODE = Rows((1, 15, 16, 100), (1, 1, 1, 1))
TREES = Rows((1, 33, 250), (5, 64, 8))


def checks(device: torch.device) -> Iterator[Planned]:
    """Everything on CUDA; in the interpreter on a CPU, which is slow, what is smallest."""
    kinds = [(TINY, torch.float32)]
    if device.type != "cpu":
        kinds += [(TINY, torch.float16), *((heads, torch.bfloat16) for heads in (TINY, LIKE_8B, LIKE_70B))]
    for (heads, dtype), rows in product(kinds, (DECODE, TREES)):
        case = _case(heads, rows, dtype, device)
        every = (heads, dtype) == (LIKE_8B, torch.bfloat16)  # the tiles of the others differ in little
        for tile in tuning.candidates(case)[: None if every else 1]:
            name = f"attention, {heads.model} heads, rows of {rows.nodes} nodes, {case.dtype}, {_text(tile)}"
            error = partial(attention_error, heads, rows, dtype, tile, device)
            yield Planned(name, TOLERANCES[dtype], error)
    yield of_case(moves.move_case(TINY, 3, 8, device))
    yield of_case(moves.rope_case(TINY, 5, device))
    yield of_case(joining.case(TINY, 2, 4, device))
    for rule in verification.RULES:
        yield of_case(verification.case(verification.Shape(rule, 3, 3, filters=False, vocab=5000), device))
    for kind in drafts.kinds(device):
        yield Planned(f"verification, {kind.text}", 0.0, partial(drafts.share_wrong, kind, device))


def of_case(case: Case) -> Planned:
    """That what is timed is right, at a size that is not worth timing."""

    def error() -> float:
        ready = case.prepare()
        return ready.error(ready.run())

    return Planned(f"{case.kernel}, {case.shape}", case.tolerance, error)


def _case(heads: Heads, rows: Rows, dtype: torch.dtype, device: torch.device) -> tuning.Case:
    """What the choice of a tile depends on; here nothing is timed, every candidate must be right."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return tuning.Case(
        device="",
        capability=10 * major + minor,
        dtype=str(dtype).removeprefix("torch."),
        head_dim=heads.size,
        group=heads.group,
        rows=tuning.query_rows(sum(rows.nodes), len(rows.nodes), heads.group),
    )


def _text(tile: Tile) -> str:
    return f"tile {tile.block_m}x{tile.block_n} of {tile.warps} warps and {tile.stages} stages"


def attention_error(heads: Heads, rows: Rows, dtype: torch.dtype, tile: Tile, device: torch.device) -> float:
    from gammaray.kernels.fused import launch

    batch = ragged(rows, device)
    k, v = (_pool(batch, heads, dtype, device) for _ in range(2))
    q = torch.randn(sum(rows.nodes), heads.query, heads.size, device=device).to(dtype)
    scaling = heads.size**-0.5
    got = launch.paged_tree_attention(q, k, v, batch, launch.Scores(scaling), Workspace(), tile=tile)
    truth = reference.paged_tree_attention(q.float(), k.float(), v.float(), batch, scaling=scaling)
    return float((got.float() - truth).abs().max() / truth.abs().max())


def ragged(rows: Rows, device: torch.device) -> PagedBatch:
    """Pages at random; each row's queries are a binary tree."""
    keys = [context + nodes for context, nodes in zip(rows.contexts, rows.nodes, strict=True)]
    pages = [-(-count // PAGE) for count in keys]
    ids, ends = torch.randperm(sum(pages)), list(accumulate(pages))
    table = torch.zeros(len(keys), max(pages), dtype=torch.int64)
    for row, (end, count) in enumerate(zip(ends, pages, strict=True)):
        table[row, :count] = ids[end - count : end]
    of = [(row, node) for row, nodes in enumerate(rows.nodes) for node in range(nodes)]
    slots = [rows.contexts[row] + node for row, node in of]
    masks = [tree(max(rows.nodes))[node] for _, node in of]
    tensor = partial(torch.tensor, dtype=torch.int64, device=device)
    return PagedBatch(
        block_table=table.to(device),
        cu_seqlens=tensor([0, *accumulate(rows.nodes)]),
        context_lens=tensor(keys),
        tree_start=tensor(rows.contexts),
        positions=tensor(
            [rows.contexts[row] + mask.bit_count() - 1 for (row, _), mask in zip(of, masks, strict=True)]
        ),
        visible=tensor([rows.contexts[row] for row, _ in of]),
        ancestors=tensor([signed(mask) for mask in masks])[:, None],
        slots=tensor(
            [
                int(table[row, slot // PAGE]) * PAGE + slot % PAGE
                for (row, _), slot in zip(of, slots, strict=True)
            ]
        ),
    )


def signed(mask: int) -> int:
    """64 bits as torch's int64 holds them."""
    return mask - (mask >> 63 << 64)


def _pool(batch: PagedBatch, heads: Heads, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers in the slots that are used, NaN in all others: who reads those, shows it."""
    counts: Sequence[int] = batch.context_lens.tolist()
    blocks = int(batch.block_table.max()) + 1
    pool = torch.full((blocks * PAGE, heads.key, heads.size), float("nan"), dtype=dtype, device=device)
    for row, count in enumerate(counts):
        at = torch.arange(count, device=device)
        slots = batch.block_table[row][at // PAGE] * PAGE + at % PAGE
        pool[slots] = torch.randn(count, heads.key, heads.size, device=device).to(dtype)
    return pool.view(blocks, PAGE, heads.key, heads.size)
