"""The arrays say what LightGBM says, for every row that there can be."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gammaray.routing.boosting import DEPTH, ROUNDS, boost, flatten, grow
from gammaray.routing.predictor import CHUNK, ZERO, Floats, Predictor, logistic

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
FEATURES = 4
ROWS = st.lists(st.tuples(*[NUMBERS] * FEATURES), min_size=1, max_size=20)


def training(seed: int, missing: float, count: int = 400) -> tuple[Floats, Floats, Floats]:
    """Rates that hang on columns 0 and 1; column 2 has few values, 3 none but 0."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, FEATURES))
    rows[:, 2], rows[:, 3] = rng.integers(3, size=count), 0.0
    rows[rng.random(rows.shape) < missing] = np.nan
    score = np.nan_to_num(rows[:, 0], nan=2.0) - np.nan_to_num(rows[:, 1], nan=-1.0) * rows[:, 2]
    return rows, logistic(np.nan_to_num(score)), rng.uniform(32, 256, count)


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.05, 0.5]), ROWS)
def test_the_arrays_predict_what_lightgbm_predicts(seed: int, missing: float, others: list[Any]) -> None:
    rows, rates, weights = training(seed, missing)
    booster = boost(rows, rates, weights)
    trees = flatten(booster.dump_model())
    edges = np.resize(trees.threshold, (CHUNK + 5, FEATURES))  # just where a walk turns, in two parts
    asked = np.concatenate([rows, np.array(others, np.float64), edges])
    np.testing.assert_allclose(trees.scores(asked), booster.predict(asked, raw_score=True), atol=1e-12)
    np.testing.assert_allclose(logistic(trees.scores(asked)), booster.predict(asked), atol=1e-12)


def test_trees_stay_small() -> None:
    trees = grow(*training(0, 0.05))
    assert len(trees.roots) == ROUNDS and 2 <= trees.depth <= DEPTH


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_rates_that_do_not_differ_grow_leaves_only(rate: float) -> None:
    rows, rates, weights = training(0, 0.05)
    trees = grow(rows, np.full_like(rates, rate), weights)
    assert trees.depth == 0
    np.testing.assert_allclose(logistic(trees.scores(rows)), rate, atol=1e-6)


# Trees of any shape ----------------------------------------------------------------------------------

LEAF = st.fixed_dictionaries({"leaf_value": st.floats(-1e3, 1e3)})
TREE = st.recursive(
    LEAF,
    lambda below: st.fixed_dictionaries(
        {
            "split_feature": st.integers(0, FEATURES - 1),
            "threshold": st.floats(-2, 2),
            "default_left": st.booleans(),
            "missing_type": st.sampled_from(["None", "NaN"]),
            "left_child": below,
            "right_child": below,
        }
    ),
    max_leaves=12,
)
MODEL = st.lists(TREE, min_size=1, max_size=4).map(
    lambda trees: {"tree_info": [{"tree_structure": tree} for tree in trees]}
)


def leaf(node: dict[str, Any], row: tuple[float, ...]) -> float:
    """As LightGBM's manual has it: a missing value goes the default way, or where none was known, is 0."""
    if "leaf_value" in node:
        return float(node["leaf_value"])
    x = row[node["split_feature"]]
    if np.isnan(x) and node["missing_type"] == "NaN":
        left = node["default_left"]
    else:
        left = (0.0 if np.isnan(x) or abs(x) <= ZERO else x) <= node["threshold"]
    return leaf(node["left_child" if left else "right_child"], row)


@given(MODEL, ROWS)
def test_a_walk_over_the_arrays_is_a_walk_down_the_trees(model: Any, rows: list[Any]) -> None:
    expected = [sum(leaf(tree["tree_structure"], row) for tree in model["tree_info"]) for row in rows]
    np.testing.assert_allclose(flatten(model).scores(np.array(rows)), expected, rtol=1e-9, atol=1e-9)


@given(MODEL)
def test_every_node_but_the_roots_has_one_parent(model: Any) -> None:
    trees = flatten(model)
    inside = trees.left != np.arange(len(trees.left))
    children = [*trees.left[inside], *trees.right[inside], *trees.roots]
    assert sorted(children) == list(range(len(trees.left)))
    assert np.array_equal(inside, trees.right != np.arange(len(trees.right)))


@given(MODEL, ROWS, st.floats(0, 10), st.floats(-10, 10))
def test_a_prediction_is_a_share_whatever_the_request(
    model: Any, rows: list[Any], slope: float, offset: float
) -> None:
    predictor = Predictor(1, FEATURES, flatten(model), slope, offset)
    found = [predictor.predict(row) for row in rows]
    assert all(alpha is not None and 0 <= alpha <= 1 for alpha in found)


# What is shipped -------------------------------------------------------------------------------------


def test_a_pickled_predictor_predicts_the_same() -> None:
    rows, rates, weights = training(0, 0.05)
    predictor = Predictor(3, FEATURES, grow(rows, rates, weights), 0.9, 0.1)
    packed = pickle.dumps(predictor)
    copy = pickle.loads(packed)
    assert copy.version == 3 and [copy.predict(row) for row in rows[:50]] == [*predictor.many(rows[:50])]
    assert len(packed) < 64_000


def test_without_trees_or_for_other_features_there_is_no_opinion() -> None:
    assert Predictor(4, FEATURES).predict([0.5] * FEATURES) is None
    predictor = Predictor(4, FEATURES, grow(*training(0, 0.05)))
    assert predictor.predict([0.5] * (FEATURES + 1)) is None
    assert predictor.predict([0.5] * FEATURES) is not None
