"""Gradient-boosted trees of an acceptance rate: LightGBM grows them, `Trees` is what they become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gammaray.routing.predictor import Floats, Trees

ROUNDS, DEPTH, LEAVES = 60, 5, 15
OPTIONS = {
    "objective": "cross_entropy",  # labels are rates in [0, 1]
    "learning_rate": 0.1,
    "max_depth": DEPTH,
    "num_leaves": LEAVES,
    "min_data_in_leaf": 20,
    "lambda_l2": 1.0,  # as much as one request of mean weight
    "deterministic": True,
    "force_row_wise": True,
    "num_threads": 1,  # the controller's node has other work
    "seed": 0,
    "verbose": -1,
}

Node = Mapping[str, Any]


def grow(rows: Floats, rates: Floats, weights: Floats) -> Trees:
    """Fit rates [N] of rows [N, F], each counted `weights` [N] times (any unit). NaN in a row is a value."""
    return flatten(boost(rows, rates, weights).dump_model())


def boost(rows: Floats, rates: Floats, weights: Floats) -> Any:
    """The same as LightGBM's Booster. Its calls leave Python's lock to others while they compute."""
    import lightgbm  # only where trees are grown; it takes long to import

    data = lightgbm.Dataset(rows, rates, weight=weights / weights.mean(), params={"verbose": -1})
    return lightgbm.train(OPTIONS, data, num_boost_round=ROUNDS)


def flatten(model: Mapping[str, Any]) -> Trees:
    """Trees of numerical splits in the form of LightGBM's `Booster.dump_model()`."""
    nodes: list[tuple[int, float, int, int, bool, float]] = []
    roots = [_take(tree["tree_structure"], nodes) for tree in model["tree_info"]]
    feature, threshold, left, right, missing_left, value = zip(*nodes, strict=True)
    return Trees(
        np.array(feature, np.int16),
        np.array(threshold, np.float64),
        np.array(left, np.int32),
        np.array(right, np.int32),
        np.array(missing_left, np.bool_),
        np.array(value, np.float64),
        np.array(roots, np.int32),
        max(_depth(tree["tree_structure"]) for tree in model["tree_info"]),
    )


def _take(node: Node, nodes: list[tuple[int, float, int, int, bool, float]]) -> int:
    """Append a node and all below it; returns its place."""
    place = len(nodes)
    nodes.append((0, 0.0, place, place, True, float(node.get("leaf_value", 0.0))))
    if "split_feature" in node:
        left, right = (_take(node[side], nodes) for side in ("left_child", "right_child"))
        split = int(node["split_feature"]), float(node["threshold"])
        nodes[place] = (*split, left, right, _missing_left(node), 0.0)
    return place


def _missing_left(node: Node) -> bool:
    """Where no value was missing in training, LightGBM reads a missing one as 0."""
    return bool(node["default_left"] if node["missing_type"] == "NaN" else node["threshold"] >= 0)


def _depth(node: Node) -> int:
    """Splits on the longest way down."""
    sides = (_depth(node[side]) for side in ("left_child", "right_child"))
    return 1 + max(sides) if "split_feature" in node else 0
