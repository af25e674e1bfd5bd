"""The rule that trims a batch, as a pure function."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gammaray.engine.calibration import survival
from gammaray.engine.profile import StepProfile
from gammaray.engine.trim import Draft, Load, trim

chances = st.floats(0.0, 1.0)


@st.composite
def drafts(draw: st.DrawFn, sampled: bool = False) -> Draft:
    nodes = draw(st.integers(0, 6))
    parents = [draw(st.integers(-1, node - 1)) for node in range(nodes)]
    known = survival(parents, [draw(chances) for _ in parents])
    expected = survival(parents, [draw(chances) for _ in parents]) if sampled else None
    return Draft(parents, known, fixed=not sampled and draw(st.booleans()), expected=expected)


@st.composite
def profiles(draw: st.DrawFn) -> StepProfile:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True))
    rises = draw(st.lists(st.floats(0.01, 2.0), min_size=len(sizes), max_size=len(sizes)))
    points = zip(sorted(sizes), np.cumsum(rises).tolist(), strict=True)
    return StepProfile(tuple(points), stepped=draw(st.booleans()))


loads = st.builds(Load, st.integers(1, 8), st.integers(0, 8), st.floats(0.0, 2.0))


def theta(batch: Sequence[Draft], kept: Sequence[Sequence[int]], load: Load, profile: StepProfile) -> float:
    """Tokens a second, by the definition."""
    tau = load.requests + sum(d.survival[n] for d, nodes in zip(batch, kept, strict=True) for n in nodes)
    fed = load.requests + load.prefill + sum(map(len, kept))
    return tau / (load.spent_s + profile.seconds(fed))


@given(st.lists(drafts(), max_size=5), loads, profiles())
def test_no_other_prefix_is_faster_and_whole_trees_stay_whole(
    batch: list[Draft], load: Load, profile: StepProfile
) -> None:
    """Stopping at the first rise of a step function, or a wrong B or tau, would be found here."""
    kept = trim(batch, load, profile)
    fixed = [list(range(len(d.parents))) if d.fixed else [] for d in batch]
    order = sorted(
        (-d.survival[n], n, at) for at, d in enumerate(batch) if not d.fixed for n in range(len(d.parents))
    )
    best = theta(batch, kept, load, profile)
    for count in range(len(order) + 1):
        other = [list(nodes) for nodes in fixed]
        for _, node, at in order[:count]:
            other[at].append(node)
        assert best >= theta(batch, other, load, profile) * (1 - 1e-12)
    assert all(kept[at] == nodes for at, nodes in enumerate(fixed) if batch[at].fixed)


@given(st.lists(drafts() | drafts(sampled=True), max_size=5), loads, profiles())
def test_a_node_is_kept_only_with_its_parent(batch: list[Draft], load: Load, profile: StepProfile) -> None:
    for draft, nodes in zip(batch, trim(batch, load, profile), strict=True):
        assert nodes == sorted(nodes)
        assert all(draft.parents[node] in (-1, *nodes) for node in nodes)


def later(parents: Sequence[int], node: int) -> set[int]:
    """The node's later siblings, its descendants and theirs: what was drawn knowing of it, or after it."""
    found: set[int] = set()
    for other in range(node + 1, len(parents)):
        if parents[other] in (node, *found) or parents[other] == parents[node]:
            found.add(other)
    return found


@settings(max_examples=300)
@given(st.lists(drafts(sampled=True) | drafts(), min_size=1, max_size=4), loads, profiles(), st.data())
def test_a_sampled_node_stays_or_goes_whatever_is_drawn_after_it(
    batch: list[Draft], load: Load, profile: StepProfile, data: st.DataObject
) -> None:
    at = data.draw(st.sampled_from(range(len(batch))))
    draft = batch[at]
    if draft.expected is None or not draft.parents:
        return
    node = data.draw(st.sampled_from(range(len(draft.parents))))
    after = later(draft.parents, node)
    changed = [data.draw(chances) if n in after else own for n, own in enumerate(draft.survival)]
    closed: list[float] = []
    for parent, own in zip(draft.parents, changed, strict=True):
        closed.append(min(own, closed[parent]) if parent >= 0 else own)
    others = [replace(d, survival=closed) if d is draft else d for d in batch]
    kept, again = trim(batch, load, profile), trim(others, load, profile)
    assert (node in kept[at]) == (node in again[at])


def test_the_unlikely_half_of_a_batch_leaves_the_room_to_the_likely_one() -> None:
    flat_then_rising = StepProfile(((1, 1.0), (20, 1.0), (100, 5.0)))
    chains = [Draft(range(-1, 7), [chance ** (n + 1) for n in range(8)]) for chance in (0.9, 0.1) * 2]
    assert list(map(len, trim(chains, Load(4), flat_then_rising))) == [8, 0, 8, 0]
    assert list(map(len, trim(chains, Load(4), StepProfile(((100, 1.0),))))) == [8, 8, 8, 8]  # nothing costs


def test_a_rise_of_a_step_function_does_not_stop_it() -> None:
    """Two more nodes fill the padding up to 4, and are worse than one; seven fill it up to 8."""
    padded = StepProfile(((2, 1.0), (4, 1.8), (8, 2.0)), stepped=True)
    assert trim([Draft(range(-1, 7), [0.95 ** (n + 1) for n in range(8)])], Load(1), padded) == [[*range(7)]]


@pytest.mark.parametrize("second", [0.1, 0.3, 0.9])
def test_a_sampled_sibling_never_takes_the_place_of_the_one_before(second: float) -> None:
    """What is said of the second may hang on the first, as that one was taken out of q."""
    one_is_free = StepProfile(((2, 1.0), (10, 9.0)))
    siblings = Draft((-1, -1), (0.4, second), expected=(0.5, 0.2))
    assert trim([siblings], Load(1), one_is_free) == [[0]]


def test_what_was_spent_on_drafting_makes_more_nodes_worth_verifying() -> None:
    profile, chain = StepProfile(((1, 1.0), (11, 4.0))), Draft(range(-1, 3), [0.6, 0.36, 0.2, 0.1])
    kept = [len(trim([chain], Load(1, spent_s=spent), profile)[0]) for spent in (0.0, 1.0, 10.0)]
    assert kept == sorted(kept) and kept[0] < kept[-1]


def test_256_requests_of_8_nodes_take_less_than_a_millisecond(
    record_property: Callable[[str, object], None],
) -> None:
    """The best of many: this machine may have other work. The limit has room for a slow one."""
    chances = np.random.default_rng(0).random(256)
    batch = [Draft(range(-1, 7), [c ** (n + 1) for n in range(8)]) for c in chances.tolist()]
    profile = StepProfile(tuple((2**k, 1.0 + 2**k / 300) for k in range(13)))
    took = []
    for _ in range(20):
        began = time.perf_counter()
        trim(batch, Load(256), profile)
        took.append(time.perf_counter() - began)
    record_property("seconds", min(took))
    assert min(took) < 0.005


@pytest.mark.parametrize("stepped", [False, True])
def test_a_column_of_seconds_is_each_alone(stepped: bool) -> None:
    profile = StepProfile(((2, 1.0), (5, 2.5), (8, 3.0)), stepped)
    tokens = np.arange(1, 20)
    assert profile.column(tokens).tolist() == pytest.approx([profile.seconds(n) for n in range(1, 20)])
