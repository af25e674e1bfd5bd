"""Drafters in the target's process: what they take of its GPU, and what the plan says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.nodes import node

from gammaray.cluster.demand import demand
from gammaray.cluster.placement import plan
from gammaray.cluster.plans import Demand, DraftDemand
from gammaray.config import parse
from gammaray.errors import ConfigError

TARGET = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
HEAD = {**TARGET, "num_hidden_layers": 3, "num_key_value_heads": 4}
MAMBA = {"num_hidden_layers": 2, "hidden_size": 64, "state_size": 16, "vocab_size": 100}
ONE_LAYER = 2 * 2 * 8 * 2  # bytes of a token: keys and values, heads, their size, 16 bits


def write(folder: Path, config: dict[str, Any], elements: int = 1000) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"a": np.zeros(elements, "float32")}, folder / "model.safetensors")
    return str(folder)


def asked(tmp_path: Path, drafter: dict[str, Any], replicas: int = 1, sizes: bool = True) -> Demand:
    settings = {
        "target": {"model": write(tmp_path / "target", TARGET), "replicas": replicas},
        "drafters": {
            "used": drafter,
            "lookup": {"method": "ngram"},
            "small": {"method": "model", "model": write(tmp_path / "small", MAMBA), "placement": "same-gpu"},
        },
        "tenants": {"chat": {"drafter": "used", "speculation": {"gamma": 4}}},
    }
    return demand(parse(settings, "test"), sizes)


def drafts(tmp_path: Path, drafter: dict[str, Any]) -> DraftDemand:
    return asked(tmp_path, drafter).drafts[0]


@pytest.mark.parametrize("method", ["ngram", "suffix", "recycle", "lookahead"])
def test_what_has_no_weights_takes_no_gpu(tmp_path: Path, method: str) -> None:
    found = drafts(tmp_path, {"method": method})
    assert (found.light, found.need) == (True, 0)


@pytest.mark.parametrize(("method", "kv"), [("medusa", 0), ("eagle", 1), ("eagle3", 1), ("dspark", 3)])
def test_a_head_takes_its_weights_and_the_kv_of_its_layers(tmp_path: Path, method: str, kv: int) -> None:
    """The config.json of a published head often names all the layers of its target."""
    found = drafts(tmp_path, {"method": method, "path": write(tmp_path / "head", HEAD, 500)})
    assert (found.light, found.wish) == (False, "same-gpu")
    assert (found.weights, found.kv) == (500 * 2, kv * 512 * 2 * ONE_LAYER)


def test_a_head_without_lm_head_copies_rows_of_the_targets(tmp_path: Path) -> None:
    """They are in no file. `dtype`: of the head alone."""
    path = write(tmp_path / "head", HEAD, 500)
    tensors = {"a": np.zeros(500, "float32"), "d2t": np.zeros(10, "int64")}
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    found = drafts(tmp_path, {"method": "eagle3", "path": path, "dtype": "float32"})
    assert found.weights == (500 + 10 + 10 * HEAD["hidden_size"]) * 4


def test_layers_of_the_target_itself(tmp_path: Path) -> None:
    shared = drafts(tmp_path, {"method": "layer_exit", "layers": 2})
    assert (shared.light, shared.need) == (False, 0)  # it computes where the target does


def test_an_exit_with_a_head_of_its_own_takes_that_head(tmp_path: Path) -> None:
    own = drafts(tmp_path, {"method": "layer_exit", "layers": 2, "path": write(tmp_path / "own", TARGET)})
    assert (own.light, own.weights, own.kv) == (False, 64 * 100 * 2, 0)


def test_layers_for_multi_token_prediction_have_kv_of_their_own(tmp_path: Path) -> None:
    found = drafts(tmp_path, {"method": "mtp"})
    assert (found.light, found.weights, found.kv) == (False, 0, 512 * ONE_LAYER)


def test_a_composite_counts_its_models(tmp_path: Path) -> None:
    found = drafts(tmp_path, {"method": "composite", "drafters": ["lookup", "small"]})
    assert (found.light, found.weights, found.kv) == (False, 1000 * 2, 0)  # a recurrent one has no KV


def test_a_head_that_is_not_here_is_not_taken_for_its_target(tmp_path: Path) -> None:
    """'EAGLE3-LLaMA3.1-Instruct-8B' has not 8 billion parameters."""
    found = asked(tmp_path, {"method": "eagle3", "path": "some/EAGLE3-Instruct-8B"})
    assert found.drafts[0].weights == 0
    assert any("is not on this machine" in note for note in found.notes)


def test_a_head_that_is_broken_is_named(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read the draft head .*head'"):
        asked(tmp_path, {"method": "eagle3", "path": str(tmp_path / "head")})


# In the plan --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "reason"),
    [
        ({"method": "recycle"}, "light: proposes without a model, on the CPU of the target's process"),
        (
            {"method": "layer_exit", "layers": 2},
            "runs the target's own first layers over the target's KV: in the target's process",
        ),
        ({"method": "eagle3"}, "continues the target's hidden states: in the target's process"),
        (
            {"method": "composite", "drafters": ["lookup", "small"]},
            "merges what others of this process draft: in the target's process",
        ),
    ],
)
@pytest.mark.parametrize("gpu", [True, False])
def test_the_plan_says_why_it_is_there(
    tmp_path: Path, drafter: dict[str, Any], reason: str, gpu: bool
) -> None:
    if drafter["method"] == "eagle3":
        drafter = {**drafter, "path": write(tmp_path / "head", HEAD)}
    made = plan([node("a", 1)] if gpu else [], asked(tmp_path, drafter, sizes=gpu))
    (found,) = [placed for placed in made.placements if placed.role == "draft"]
    assert found.reason == reason
    assert found.gpus == ((0,) if gpu and drafter["method"] != "recycle" else ())


def test_every_replica_has_a_head_of_its_own_or_the_plan_says_that_it_has_not(tmp_path: Path) -> None:
    wanted = asked(tmp_path, {"method": "medusa", "path": write(tmp_path / "head", HEAD, 10**6)}, replicas=2)
    made = plan([node("a", 2)], wanted)
    assert [placed.replica for placed in made.placements if placed.role == "draft"] == [0, 1]
    tight = plan([node("a", 2, memory=2 * 10**6)], wanted)
    expected = [f"draft used of tenant chat worker {worker}" for worker in range(2)]
    assert [lost.what for lost in tight.unplaced] == expected
