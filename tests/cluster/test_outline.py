"""What operators see of a plan, and which drafters only some tenants can reach."""

from __future__ import annotations

from gammaray.actors.target import Slot
from gammaray.cluster.control import apart
from gammaray.cluster.layout import Layout
from gammaray.cluster.outline import outline
from gammaray.cluster.plans import Placed, Plan
from gammaray.cluster.topology import Gpu, Join, Topology
from gammaray.config import parse


def test_islands_and_seats() -> None:
    gpus = tuple(Gpu(i, f"GPU-{i}", "NVIDIA H100 80GB HBM3", nvlink_version=4.0) for i in range(3))
    topology = Topology("box", gpus, {(0, 1): Join(18)})
    plan = Plan(
        (
            Placed("target", "box", (0,), "split", "", 0),
            Placed("draft", "box", (1,), "split", "", 0, "bank", "small"),
            Placed("draft", "box", (), "in-process", "", 0, "shop", "lookup"),
        )
    )
    assert outline(plan, [topology], 4.0) == {
        "islands": [[["box", 0], ["box", 1]], [["box", 2]]],
        "seats": [
            {"node": "box", "gpu": 0, "what": "target 0", "tenant": None},
            {"node": "box", "gpu": 1, "what": "small", "tenant": "bank"},
            {"node": "box", "gpu": None, "what": "lookup", "tenant": "shop"},
        ],
    }


def test_drafters_that_only_draft_workers_hold() -> None:
    drafters = {name: {"method": "model", "model": "x"} for name in ("own", "shared", "none")}
    tenants = {"bank": {"drafter": "own", "fallback_drafter": "shared"}, "shop": {"drafter": "shared"}}
    config = parse({"target": {"model": "tiny"}, "drafters": drafters, "tenants": tenants}, "test")
    slot = Slot(pools=frozenset({("bank", "own"), ("bank", "shared")}))
    assert apart(config, Layout((slot,))) == {"own"}
    assert apart(config, Layout()) == frozenset()
