"""Padding, buckets and buffers of captured passes, with a capture that calls the work again instead.

A padded step must give the numbers of the unpadded one to the bit: the padding may only add rows. What a CUDA
graph would do besides is not tested anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from tiny import tiny_llama, tiny_model
from torch import Tensor
from transformers import MistralConfig, PreTrainedModel, Qwen3Config

from gammaray.engine.batch import Row, Step, StepSizes, pack
from gammaray.engine.drafters.base import DraftView
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.graphs import MOST_TOKENS, Graphs, buckets
from gammaray.engine.loading import load_runner
from gammaray.engine.profile import REPEATS, measure
from gammaray.engine.runner import ModelRunner
from gammaray.engine.sim import SimClock
from gammaray.types import SamplingParams

BLOCK_SIZE, BLOCKS = 4, 32
SIZES = [StepSizes(8, 4, 8, 4), StepSizes(8, 4, 8, 12), StepSizes(16, 4, 12, 12), StepSizes(4, 2, 4, 4)]
MODELS = {
    "lean": lambda: tiny_llama(),
    "qwen3": lambda: tiny_model(Qwen3Config, head_dim=8),
    "window": lambda: tiny_model(MistralConfig, sliding_window=5),
}


class Again:
    """A capture without a GPU: a replay does the work once more. Counts, and remembers what was recorded."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replays: list[int] = []  # the number of the recording, in order

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        number, self.recorded = self.recorded, self.recorded + 1

        def replay() -> None:
            self.replays.append(number)
            work()

        return replay


def two_runners(
    model: PreTrainedModel, sizes: Sequence[StepSizes], layers: Sequence[int] = ()
) -> tuple[ModelRunner, ModelRunner, Again]:
    """Of the same weights, with pools full of NaN; the second one has recorded passes."""
    plain, padded = (load_runner(model, "float32", BLOCK_SIZE, BLOCKS, device="cpu") for _ in range(2))
    for runner in (plain, padded):
        for pool in (x for pair in runner._pool.layers for x in pair):
            pool.fill_(float("nan"))
    capture = Again()
    padded.record(sizes, capture, layers)
    return plain, padded, capture


def equal(plain: ModelRunner, padded: ModelRunner, rows: Sequence[Row]) -> Tensor:
    expected, found = plain.forward(rows), padded.forward(rows)
    assert torch.equal(expected, found)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_padded_steps_give_the_same_bits(name: str) -> None:
    """Catches padding that is seen, that writes where it must not, or that shifts the wanted rows."""
    plain, padded, capture = two_runners(MODELS[name](), SIZES)
    rng = random.Random(0)
    first, second, third = [5, 2, 9], [7, 0, 11, 3], [1, 30]

    def tokens(count: int) -> list[int]:
        return [rng.randrange(32) for _ in range(count)]

    equal(plain, padded, [Row(tokens(7), 0, first), Row(tokens(3), 0, second, logits=0)])  # T 10: the third
    equal(plain, padded, [Row(tokens(1), 7, first, tokens(3), [-1, 0, 0]), Row(tokens(2), 3, second)])
    equal(plain, padded, [Row(tokens(1), 8, first), Row(tokens(1), 5, second), Row(tokens(5), 0, third)])
    equal(plain, padded, [Row(tokens(1), 9, first)])
    equal(plain, padded, [Row((), 10, first, tokens(2), [-1, -1], fed=1)])
    assert capture.replays == [0, 2, 2, 3, 3]  # the largest was recorded first
    slots = [first[i // 4] * 4 + i % 4 for i in range(10)] + [second[i // 4] * 4 + i % 4 for i in range(6)]
    for (k, v), (k_padded, v_padded) in zip(plain.read_kv(slots), padded.read_kv(slots), strict=True):
        assert torch.equal(k, k_padded) and torch.equal(v, v_padded)
    untouched = [slot for slot in range(BLOCKS * BLOCK_SIZE) if slot // 4 not in (*first, *second, *third)]
    assert all(x.isnan().all() for pair in padded.read_kv(untouched) for x in pair)


def test_random_steps() -> None:
    """Catches a bucket that holds what an earlier, larger step left in it."""
    plain, padded, capture = two_runners(tiny_llama(), SIZES)
    rng = random.Random(1)
    for _ in range(30):
        rows = []
        for row in range(rng.randint(1, 4)):
            pending, nodes = rng.randint(1, 3), rng.randint(0, 3)
            parents = [rng.randint(-1, node - 1) for node in range(nodes)]
            ids = [rng.randrange(32) for _ in range(pending + nodes)]
            blocks = rng.sample(range(8 * row, 8 * row + 8), rng.randint(2, 5))
            rows.append(Row(ids[:pending], 0, blocks, ids[pending:], parents, logits=rng.randint(0, pending)))
        equal(plain, padded, rows)
    assert len(set(capture.replays)) == len(SIZES) and len(capture.replays) < 30


def test_steps_beyond_every_bucket_run_as_they_are() -> None:
    plain, padded, capture = two_runners(tiny_llama(), SIZES)
    equal(plain, padded, [Row(list(range(17)), 0, [0, 1, 2, 3, 4])])  # too many tokens
    equal(plain, padded, [Row([1], 0, [block]) for block in range(5)])  # rows
    equal(plain, padded, [Row(list(range(13)), 0, [0, 1, 2, 3], logits=13)])  # wanted logits
    equal(plain, padded, [Row([3], 0, list(range(13)))])  # blocks
    assert capture.replays == []


def test_replays_read_and_write_the_same_memory() -> None:
    """Catches a tensor that is made anew, where a graph would go on with the old one's address."""
    seen: dict[StepSizes, set[tuple[int, ...]]] = {size: set() for size in SIZES}

    def forward(step: Step) -> list[Tensor]:
        tensors = (step.input_ids, step.wanted, *(getattr(step.paged, name) for name in step.paged.__slots__))
        seen[step.sizes].add(tuple(x.data_ptr() for x in tensors))
        return [step.input_ids[step.wanted, None].float(), step.paged.positions[:, None].float()]

    def step(*ids: int) -> Step:
        return pack([Row(ids, 0, [1, 2], logits=len(ids))], BLOCK_SIZE)

    graphs = Graphs(forward, SIZES, step(0), torch.device("cpu"), 99, Again())
    outputs = [graphs.run(step(*ids), size) for ids in ((1, 2), (3,), (4, 5, 6)) for size in SIZES]
    assert all(len(addresses) == 1 for addresses in seen.values())
    assert len({tuple(part.data_ptr() for part in output) for output in outputs}) == 1
    assert [part.flatten().tolist() for part in outputs[-1]] == [[4, 5, 6], [0, 1, 2]]


def test_what_a_caller_was_given_stays() -> None:
    """Catches logits that the next replay overwrites: a drafter keeps them from level to level."""
    _, padded, capture = two_runners(tiny_llama(), SIZES)
    first = padded.forward([Row([1, 2, 3], 0, [1])])
    kept = first.clone()
    padded.forward([Row([4, 5, 6], 0, [2])])
    assert torch.equal(first, kept) and capture.replays == [3, 3]


@pytest.mark.parametrize("layers", [(0, 1, 3), (1, 3), (3, 0)])
@pytest.mark.parametrize("name", MODELS)
def test_replayed_passes_leave_the_hidden_states_of_all_tokens(name: str, layers: tuple[int, ...]) -> None:
    """Catches an engine with a head drafter that runs without graphs, states of the wrong layer, and those of
    padding or of an earlier step."""
    plain, padded, capture = two_runners(MODELS[name](), SIZES, (0, 1, 3))
    rng = random.Random(2)
    for length in (3, 7, 2, 1):
        ids = [rng.randrange(32) for _ in range(length)]
        rows = [Row(ids, 0, [5, 2, 11], [4, 4], [-1, 0]), Row([7], 0, [9])]
        expected, found = (runner.forward_features(rows, layers) for runner in (plain, padded))
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        assert found[1].shape == (length + 3, len(layers) * 32)
        equal(plain, padded, rows)  # nobody asked for states, and the same graph is replayed
    assert capture.replays == [2, 2, 0, 0, 2, 2, 3, 3] and capture.recorded == len(SIZES)


def test_states_of_other_layers_are_had_without_a_graph() -> None:
    plain, padded, capture = two_runners(tiny_llama(), SIZES, (0, 3))
    rows = [Row([1, 2, 3], 0, [1])]
    expected, found = (runner.forward_features(rows, (0, 2)) for runner in (plain, padded))
    assert torch.equal(expected[1], found[1]) and not capture.replays


def test_kept_states_outlive_the_next_replay() -> None:
    _, padded, _ = two_runners(tiny_llama(), SIZES, (2,))
    _, first = padded.forward_features([Row([1, 2, 3], 0, [1])], (2,))
    kept = first.clone()
    padded.forward_features([Row([4, 5, 6], 0, [2])], (2,))
    assert torch.equal(first, kept)


def test_the_smallest_bucket_is_chosen() -> None:
    _, padded, _ = two_runners(tiny_llama(), SIZES)
    graphs = padded._graphs
    assert graphs is not None and graphs.tokens == [4, 8, 16]
    assert graphs.bucket(StepSizes(3, 1, 1, 2)) == SIZES[3]
    assert graphs.bucket(StepSizes(3, 3, 3, 4)) == SIZES[0]
    assert graphs.bucket(StepSizes(8, 1, 8, 5)) == SIZES[1]
    assert graphs.bucket(StepSizes(9, 1, 9, 1)) == SIZES[2]
    assert graphs.bucket(StepSizes(9, 1, 13, 1)) is None


def test_buckets_cover_all_steps_that_decode_and_verify() -> None:
    """Catches a gap, which would run without a graph, and padding of more than a half."""
    for max_batch, budget, blocks in ((1, 256, 512), (64, 256, 100), (64, 1000, 8193), (3, 5, 1)):
        found = buckets(max_batch, budget, blocks)
        most = min(budget, max_batch * 65, MOST_TOKENS)
        assert found[-1] == StepSizes(most, min(most, max_batch), most, blocks) and len(found) < 120
        for tokens in range(1, most + 1):
            for rows in range(-(-tokens // 65), min(tokens, max_batch) + 1):
                fits = [bucket for bucket in found if StepSizes(tokens, rows, tokens, 1).fits(bucket)]
                assert fits and min(fits).tokens < 2 * tokens
    assert {b.tokens for b in found} == {1, 2, 4, 5}
    tokens = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert sorted({bucket.tokens for bucket in buckets(64, 256, 1)}) == tokens


def test_a_bucket_has_about_as_many_rows_as_the_step() -> None:
    """Catches trees padded to a batch that decodes: attention picks its tiles by the tokens of a row."""
    found = buckets(64, 256, 100)
    for rows, nodes in ((8, 8), (16, 4), (1, 64), (64, 1), (3, 16)):
        fits = min(b for b in found if StepSizes(rows * nodes, rows, rows * nodes, 9).fits(b))
        assert rows <= fits.rows <= 2 * rows and fits.tokens <= 1.5 * rows * nodes


def test_a_padded_step_says_what_is_padding() -> None:
    step = pack([Row([3, 4], 0, [2]), Row([5], 4, [6, 7])], BLOCK_SIZE)
    padded = step.padded(StepSizes(5, 4, 6, 3), nowhere=99)
    assert padded.input_ids.tolist() == [3, 4, 5, 0, 0]
    assert padded.paged.slots.tolist() == [8, 9, 28, 99, 99]
    assert padded.paged.cu_seqlens.tolist() == [0, 2, 3, 3, 3]
    assert padded.paged.context_lens.tolist() == [2, 5, 0, 0]
    assert padded.paged.block_table.tolist() == [[2, 0, 0], [6, 7, 0], [0, 0, 0], [0, 0, 0]]
    assert padded.wanted.tolist() == [1, 2, 0, 0, 0, 0]


def test_a_drafter_drafts_the_same_with_recorded_passes() -> None:
    """Catches logits that a later level overwrites while the tree still needs them."""
    plain, padded, capture = two_runners(tiny_llama(), SIZES)
    trees = []
    for runner in (plain, padded):
        drafter = ModelDrafter(runner)
        view = DraftView("a", 6, 3, 2, SamplingParams(temperature=0.0), 0)
        drafter.catch_up("a", [1, 2, 3, 4, 5, 6])
        trees.append(drafter.collect(drafter.begin([view]), 0.0)["a"])
    assert trees[0] == trees[1] and len(trees[0]) == 6
    assert len(capture.replays) == 3  # the prompt, and two levels


def test_the_profile_is_of_the_buckets() -> None:
    """Catches a profile of steps that never run: SPS(B) must be that of padded ones."""
    _, padded, capture = two_runners(tiny_llama(), SIZES)
    clock, waits = SimClock(), 0

    def wait() -> None:
        nonlocal waits
        waits += 1
        clock.advance(0.001 * (4 - capture.replays[-1]))

    found = measure(padded, 16, clock, padded=padded.padded_tokens, rows=2, wait=wait)
    assert found.stepped and [tokens for tokens, _ in found.points] == [4, 8, 16]
    once = [3, 2, 0]  # the smallest is recorded last
    assert capture.replays == [3, *once * REPEATS] and waits == 1 + 3 * REPEATS
    assert found.seconds(5) == found.seconds(8) == pytest.approx(0.002)
