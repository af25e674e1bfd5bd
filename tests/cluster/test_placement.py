"""What goes where: a table of situations, and properties of every plan."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nodes import GB, all_pairs, node

from gammaray.cluster import matrix
from gammaray.cluster.devices import hardware
from gammaray.cluster.placement import Demand, DraftDemand, Placed, Plan, TargetDemand, plan
from gammaray.cluster.search import best
from gammaray.cluster.sites import Sites
from gammaray.cluster.state import Item, State
from gammaray.cluster.topology import Gpu, Join, Mig, Topology, fabric_islands, linked
from gammaray.errors import ConfigError

DRAFT = DraftDemand("chat", "small", "model", light=False, weights=2 * GB, kv=1 * GB)
LIGHT = DraftDemand("chat", "lookup", "ngram", light=True)


def demand(
    *drafts: DraftDemand, replicas: int = 1, parallel: int = 1, need: int = 20, version: float = 4.0
) -> Demand:
    """`need`: GB of one share of the target."""
    target = TargetDemand("target-8b", replicas, parallel, weights=(need - 4) * GB, kv=4 * GB)
    return Demand(target, drafts, version)


def drafts_of(made: Plan) -> list[Placed]:
    return [placed for placed in made.placements if placed.role == "draft"]


def targets_of(made: Plan) -> list[Placed]:
    return [placed for placed in made.placements if placed.role == "target"]


def only_draft(made: Plan) -> Placed:
    (draft,) = drafts_of(made)
    assert made.unplaced == ()
    return draft


# The given matrices


@pytest.mark.parametrize(
    ("file", "version", "mode", "says"),
    [
        ("hgx_h100_nv18", 4, "split", "18 NVLinks of version 4"),
        ("h100_4gpu_direct_nv6", 4, "split", "6 NVLinks of version 4"),
        ("gb200_tray_nv18", 4, "split", "18 NVLinks of version 5"),
        ("rtx4090_phb", 4, "same-gpu", "PCIe PHB"),
        ("sxm_8gpu_no_nvlink_seen", 4, "same-gpu", "links are down"),
        ("single_gpu", 4, "same-gpu", "no other GPU"),
        ("a100_pcie_one_bridge", 4, "same-gpu", "no GPU is linked directly"),
        ("a100_pcie_one_bridge", 3, "split", "12 NVLinks of version 3"),
        ("a100_4gpu_direct_nv4", 4, "same-gpu", "of version 3, below 4"),
        ("a100_4gpu_direct_nv4", 3, "split", "4 NVLinks of version 3"),
        ("dgx_a100_nv12", 4, "same-gpu", "of version 3, below 4"),
        ("dgx2_v100_nv6", 4, "same-gpu", "of version 2, below 4"),
    ],
)
def test_each_given_matrix(shared: Path, file: str, version: float, mode: str, says: str) -> None:
    topologies = matrix.read(shared / "data" / "topologies" / f"{file}.json")
    made = plan(topologies, demand(DRAFT, need=18, version=version))
    (target,), draft = targets_of(made), only_draft(made)
    assert (target.mode, draft.mode) == (mode, mode)
    assert (target.gpus == draft.gpus) == (mode == "same-gpu")
    assert says in draft.reason


def test_no_given_matrix_is_left_out(shared: Path) -> None:
    files = {file.stem for file in (shared / "data" / "topologies").glob("*.json")}
    tested = {row[0] for row in test_each_given_matrix.pytestmark[0].args[1]}  # type: ignore[attr-defined]
    assert files == tested


def test_a_bridge_is_used_only_from_inside(shared: Path) -> None:
    topologies = matrix.read(shared / "data" / "topologies" / "a100_pcie_one_bridge.json")
    made = plan(topologies, demand(DRAFT, version=3, replicas=2))
    first, second = targets_of(made)
    assert {*first.gpus, *drafts_of(made)[0].gpus} == {0, 1}
    assert second.gpus in [(2,), (3,)]


def test_dead_links_are_named(shared: Path) -> None:
    (healthy,) = matrix.read(shared / "data" / "topologies" / "hgx_h100_nv18.json")
    of_gpus = replace(healthy, gpus=tuple(replace(gpu, fault="its links are down") for gpu in healthy.gpus))
    joins = {pair: replace(join, fault="all links are down") for pair, join in healthy.joins.items()}
    for dead in (of_gpus, replace(healthy, joins=joins)):
        draft = only_draft(plan([dead], demand(DRAFT)))
        assert draft.mode == "same-gpu"
        assert "links are down" in draft.reason


def test_two_tenants_with_pools_on_hgx_h100(shared: Path) -> None:
    topologies = matrix.read(shared / "data" / "topologies" / "hgx_h100_nv18.json")
    chat = replace(DRAFT, workers=2)
    code = replace(DRAFT, tenant="code", drafter="coder", workers=4)
    made = plan(topologies, demand(chat, code, replicas=2))
    drafts = drafts_of(made)
    assert {draft.mode for draft in drafts} == {"split"}
    near = Counter((draft.replica, draft.tenant) for draft in drafts)
    assert near == {(0, "chat"): 1, (1, "chat"): 1, (0, "code"): 2, (1, "code"): 2}
    used = [gpu for placed in made.placements for gpu in placed.gpus]
    assert sorted(used) == list(range(8))  # one each


# Where drafts go


def test_version_unknown_shares_the_gpu_and_says_what_helps() -> None:
    draft = only_draft(plan([node("a", 2, all_pairs(2), version=None)], demand(DRAFT)))
    assert draft.mode == "same-gpu" and "--gpu-name" in draft.reason


def test_wish_same_gpu_keeps_a_free_partner_unused() -> None:
    draft = only_draft(plan([node("a", 2, all_pairs(2))], demand(replace(DRAFT, wish="same-gpu"))))
    assert draft.mode == "same-gpu" and "same-gpu" in draft.reason


def test_forced_split_across_pcie_tells_its_cost() -> None:
    wanted = replace(DRAFT, wish="split", round_bytes=2080)
    asked = demand(wanted)
    asked = replace(asked, target=replace(asked.target, feature_bytes=8192))
    draft = only_draft(plan([node("a", 2)], asked))
    assert (draft.mode, draft.gpus) == ("split", (1,))
    for part in ("PCIe SYS", "about 1 ms", "2080 bytes", "8192 bytes a token", "PCIe"):
        assert part in draft.reason


def test_forced_split_takes_the_nearest_over_pcie() -> None:
    joins = {(0, 1): Join(pcie="SYS"), (0, 2): Join(pcie="PIX"), (1, 2): Join(pcie="SYS")}
    draft = only_draft(plan([replace(node("a", 3), joins=joins)], demand(replace(DRAFT, wish="split"))))
    assert draft.gpus == (2,)


def test_forced_split_crosses_nodes_last() -> None:
    wanted = replace(DRAFT, wish="split", weights=60 * GB)
    pair, single = node("a", 2), node("b", 1)
    assert only_draft(plan([single, pair], demand(wanted))).node == "a"
    made = only_draft(plan([node("a", 1, memory=80 * GB), single], demand(wanted)))
    assert made.node == "b" and "network" in made.reason


def test_forced_split_on_a_single_gpu_is_a_process_of_its_own() -> None:
    made = plan([node("a", 1)], demand(replace(DRAFT, wish="split")))
    draft = only_draft(made)
    assert (draft.mode, draft.gpus) == ("split", (0,)) and "take turns" in draft.reason
    assert 0 < (draft.memory_fraction or 0) < (targets_of(made)[0].memory_fraction or 0)


def test_a_forced_split_draws_its_target_to_a_node_with_another_gpu() -> None:
    draft = only_draft(plan([node("a", 1), node("b", 2)], demand(replace(DRAFT, wish="split"))))
    assert (draft.node, draft.gpus) == ("b", (1,))


def test_workers_share_a_draft_gpu_when_gpus_are_short() -> None:
    other = replace(DRAFT, tenant="code", drafter="coder")
    made = plan([node("a", 2, all_pairs(2))], demand(DRAFT, other))
    first, second = drafts_of(made)
    assert (first.gpus, second.gpus, first.mode, second.mode) == ((1,), (1,), "split", "split")
    assert first.memory_fraction == second.memory_fraction == pytest.approx(0.45)
    assert "code/coder" in first.reason


def test_a_draft_never_takes_the_gpu_of_a_target() -> None:
    made = plan([node("a", 2, all_pairs(2))], demand(DRAFT, replicas=2))
    assert [target.gpus for target in targets_of(made)] == [(0,), (1,)]
    draft = drafts_of(made)[0]
    assert draft.mode == "same-gpu"
    assert "no GPU linked directly to GPU 0 can take it: 1 with a target, 0 with less" in draft.reason


def test_replicas_beyond_the_pool_hold_a_copy_unless_a_worker_reaches_them() -> None:
    apart = plan([node("a", 2)], demand(DRAFT, replicas=2))
    assert [(draft.replica, draft.worker) for draft in drafts_of(apart)] == [(0, 0), (1, 1)]
    linked_ = plan([node("a", 3, all_pairs(3))], demand(DRAFT, replicas=2))
    assert [(draft.replica, draft.mode) for draft in drafts_of(linked_)] == [(0, "split")]


def test_a_forced_split_serves_replicas_beyond_its_pool_from_anywhere() -> None:
    """It is never in the target's process, not even as a copy."""
    wanted = replace(DRAFT, wish="split")
    made = plan([node("a", 3)], demand(wanted, replicas=2))
    assert [(draft.replica, draft.mode) for draft in drafts_of(made)] == [(0, "split")]
    assert [target.mode for target in targets_of(made)] == ["split", "split"]
    large = replace(wanted, weights=40 * GB)
    made = plan([node("a", 2)], demand(large, replace(large, drafter="other"), replicas=2))
    assert [(draft.drafter, draft.mode) for draft in drafts_of(made)] == [("small", "split")]
    assert [missing.what for missing in made.unplaced] == ["draft other of tenant chat worker 0"]


def test_a_replica_goes_where_it_reaches_drafts_that_are_there() -> None:
    """Two workers share GPU 1; one of them, or the only one, is asked by the other replica."""
    for workers in (1, 2):
        made = plan(
            [node("a", 3, all_pairs(3)), node("b", 1)], demand(replace(DRAFT, workers=workers), replicas=2)
        )
        assert [target.gpus for target in targets_of(made)] == [(0,), (2,)]
        assert {target.mode for target in targets_of(made)} == {"split"}
        assert [draft.gpus for draft in drafts_of(made)] == [(1,)] * workers


def test_room_for_growth_is_no_split() -> None:
    """Replica 1 has a copy, and beside it room for a worker."""
    made = plan(
        [node(name, 2, all_pairs(2)) for name in "ab"], demand(replace(DRAFT, max_workers=2), replicas=2)
    )
    assert [draft.spare for draft in drafts_of(made)] == [False, False, True]
    assert [target.mode for target in targets_of(made)] == ["split", "same-gpu"]


def test_one_process_holds_one_copy_of_a_drafter() -> None:
    made = plan([node("a", 1)], demand(DRAFT, replace(DRAFT, tenant="code")))
    assert [bool(draft.memory_fraction) for draft in drafts_of(made)] == [True, False]
    assert "one copy does" in drafts_of(made)[1].reason


def test_light_drafters_live_in_each_target_process() -> None:
    made = plan([node("a", 2, all_pairs(2))], demand(LIGHT, replicas=2))
    assert [(draft.mode, draft.gpus, draft.replica) for draft in drafts_of(made)] == [
        ("in-process", (), 0),
        ("in-process", (), 1),
    ]


def test_multi_node_nvlink_pairs_across_nodes() -> None:
    def tray(name: str, uuid: str, version: float = 4.0) -> Topology:
        one = node(name, 1, version=version)
        return replace(one, gpus=(replace(one.gpus[0], clique=(uuid, 1)),))

    draft = only_draft(plan([tray("a", "x"), tray("b", "x")], demand(DRAFT)))
    assert (draft.mode, draft.node) == ("split", "b") and "fabric" in draft.reason
    for other in (tray("b", "y"), tray("b", "x", version=3.0)):
        assert only_draft(plan([tray("a", "x"), other], demand(DRAFT))).mode == "same-gpu"


def test_mig_parts_are_small_gpus_without_links() -> None:
    parts = (Mig("MIG-0", 40 * GB), Mig("MIG-1", 40 * GB))
    whole = node("a", 2, all_pairs(2))
    split = replace(whole, gpus=(replace(whole.gpus[0], mig=parts), whole.gpus[1]))
    made = plan([split], demand(DRAFT, replicas=3))
    assert [target.uuids for target in targets_of(made)] == [("MIG-0",), ("MIG-1",), ("GPU-a-1",)]
    assert only_draft(plan([replace(split, gpus=split.gpus[:1])], demand(DRAFT))).mode == "same-gpu"


# Where targets go


def test_full_islands_stay_free() -> None:
    """GPU 4 has no links, 5 and 6 are a pair, 0 to 3 an island."""
    mixed = node("a", 7, [*all_pairs(4), (5, 6)])
    assert targets_of(plan([mixed], demand()))[0].gpus == (4,)
    assert targets_of(plan([mixed], demand(DRAFT)))[0].gpus == (5,)
    assert targets_of(plan([mixed], demand(parallel=2)))[0].gpus == (5, 6)
    assert targets_of(plan([mixed], demand(parallel=4)))[0].gpus == (0, 1, 2, 3)


def test_a_node_in_use_comes_before_a_fresh_one() -> None:
    whole = [node(name, 4, all_pairs(4)) for name in "ab"]
    made = plan(whole, demand(replicas=3))
    assert {target.node for target in targets_of(made)} == {"a"}


def test_a_group_is_linked_all_to_all_in_a_hybrid_cube_mesh() -> None:
    """DGX-1: two quads, and one link from each GPU to its counterpart. 0 and 5 are not linked."""
    quads = [*all_pairs(4), *((a + 4, b + 4) for a, b in all_pairs(4))]
    mesh = node("a", 8, [*quads, *((i, i + 4) for i in range(4))], version=2.0)
    made = plan([mesh], demand(parallel=4, replicas=2))
    assert [target.gpus for target in targets_of(made)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    (missing,) = plan([mesh], demand(parallel=8)).unplaced
    assert "8 such GPUs linked all to all" in missing.needs and "tensor_parallel: 4" in missing.needs


def of_memory(sizes: Sequence[int], links: Iterable[tuple[int, int]]) -> Topology:
    """GPUs of so many GB."""
    whole = node("a", len(sizes), links)
    sized = (replace(gpu, memory=size * GB) for gpu, size in zip(whole.gpus, sizes, strict=True))
    return replace(whole, gpus=tuple(sized))


def test_a_group_has_gpus_of_equal_memory() -> None:
    made = plan([of_memory([40, 80, 40, 80], all_pairs(4))], demand(parallel=2, replicas=2))
    assert [target.gpus for target in targets_of(made)] == [(0, 2), (1, 3)]
    (missing,) = plan([of_memory([40, 80], [(0, 1)])], demand(parallel=2)).unplaced
    assert "no 2 GPUs" in missing.reason


def test_shards_get_what_is_left_where_the_drafter_is() -> None:
    """One share for both GPUs, and the first holds the drafter, too."""
    made = plan([node("a", 2, all_pairs(2))], demand(replace(DRAFT, wish="same-gpu"), parallel=2, need=40))
    (target,), draft = targets_of(made), only_draft(made)
    assert target.gpus == (0, 1) and draft.gpus == (0,)
    assert (target.memory_fraction or 0) + (draft.memory_fraction or 0) == pytest.approx(0.9)


def test_a_worker_takes_the_smallest_gpu_that_does() -> None:
    """GPU 0 is the target's, as the smallest that has three partners."""
    made = plan([of_memory([24, 80, 24, 48], all_pairs(4))], demand(replace(DRAFT, weights=30 * GB)))
    assert targets_of(made)[0].gpus == (0,)
    assert only_draft(made).gpus == (3,)


def test_the_first_pair_is_not_in_the_way_of_the_second() -> None:
    """A chain 1-0-2-3: taking 0 and 2 would leave no pair."""
    made = plan([node("a", 4, [(0, 1), (0, 2), (2, 3)])], demand(parallel=2, replicas=2))
    assert len(targets_of(made)) == 2


def test_memory_decides_and_the_answer_tells_what_helps() -> None:
    (missing,) = plan([node("a", 4, all_pairs(4))], demand(need=100)).unplaced
    assert "100.0 GB" in missing.reason and "72.0 GB" in missing.reason
    assert "111.1 GB" in missing.needs and "dtype" in missing.needs
    assert "tensor_parallel" not in missing.needs  # the engine refuses it on GPUs


def test_advice_is_given_only_where_it_helps() -> None:
    apart = [node("a", 4)]
    (missing,) = plan(apart, demand(need=30, parallel=4)).unplaced
    assert "tensor_parallel" not in missing.needs  # 120 GB
    (missing,) = plan(apart, demand(need=18, parallel=4)).unplaced
    assert missing.needs.endswith("or target.tensor_parallel: 1")  # 72 GB
    (missing,) = plan([node("a", 4, [(0, 1)])], demand(need=30, parallel=4)).unplaced
    assert missing.needs.endswith("or target.tensor_parallel: 2")  # 60 GB each
    (missing,) = plan([node("a", 2)], demand(replace(DRAFT, weights=80 * GB, wish="split"))).unplaced
    assert "one more GPU, of at least 90.0 GB" in missing.needs
    wanted = replace(DRAFT, weights=59 * GB, wish="same-gpu")
    (missing,) = plan([node("a", 2)], demand(wanted, need=30)).unplaced
    assert "a GPU of at least 100.0 GB for all of them" in missing.needs


def test_replicas_that_find_no_gpu_are_counted_one_by_one() -> None:
    made = plan([node("a", 2)], demand(DRAFT, replicas=4))
    assert [missing.what for missing in made.unplaced] == [
        "target target-8b replica 2",
        "target target-8b replica 3",
    ]
    assert "target.replicas: 2" in made.unplaced[0].needs
    one = plan([node("a", 1)], demand(replicas=2)).unplaced[0]
    assert one.reason == "every GPU that holds 20.0 GB is taken, by 1 replica"


def test_a_draft_too_large_to_share_needs_a_linked_gpu() -> None:
    (missing,) = plan([node("a", 2)], demand(replace(DRAFT, weights=60 * GB))).unplaced
    assert "draft small of tenant chat" in missing.what
    assert "61.0 GB" in missing.needs and "linked directly to GPU" in missing.needs


def test_without_a_target_no_draft_has_a_place() -> None:
    made = plan([node("a", 1)], demand(replace(DRAFT, workers=2), LIGHT, need=100))
    assert made.placements == () and len(made.unplaced) == 1 + 2  # the light one needs none


def test_unknown_memory_is_assumed_to_suffice_and_said() -> None:
    made = plan([node("a", 1, memory=None)], demand(DRAFT, need=500))
    assert made.unplaced == () and any("unknown" in note for note in made.notes)
    assert sum(placed.memory_fraction or 0 for placed in made.placements) == pytest.approx(0.9)


def test_what_is_left_of_a_gpu_goes_to_kv_in_proportion() -> None:
    made = plan([node("a", 1)], demand(DRAFT))
    target, draft = made.placements
    spare = 0.9 * 80 - 20 - 3
    assert target.memory_fraction == pytest.approx((20 + spare * 4 / 5) / 80)
    assert draft.memory_fraction == pytest.approx((3 + spare * 1 / 5) / 80)


# CPUs


@pytest.mark.parametrize("topologies", [[], [node("cpu", 0)]])
def test_without_gpus_all_compute_in_the_target_process(topologies: list[Topology]) -> None:
    made = plan(topologies, demand(DRAFT, LIGHT, replicas=2))
    assert {(placed.mode, placed.gpus, placed.memory_fraction) for placed in made.placements} == {
        ("in-process", (), None)
    }
    near = [(draft.drafter, draft.replica) for draft in drafts_of(made)]
    assert sorted(near) == [("lookup", 0), ("lookup", 1), ("small", 0), ("small", 1)]


def test_split_on_cpus_serves_all_replicas() -> None:
    made = plan([], demand(replace(DRAFT, wish="split"), replicas=2))
    assert [target.mode for target in targets_of(made)] == ["split", "split"]


def test_split_on_cpus_is_a_process_on_the_same_node() -> None:
    made = plan([node("b", 0), node("a", 0)], demand(replace(DRAFT, wish="split", workers=2), replicas=2))
    assert [(p.role, p.node, p.mode) for p in made.placements] == [
        ("target", "a", "split"),
        ("draft", "a", "split"),
        ("target", "b", "split"),
        ("draft", "b", "split"),
    ]


def test_one_name_for_two_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="'a'"):
        plan([node("a", 1), node("a", 1)], demand())


# Properties


@st.composite
def gpus(draw: st.DrawFn, name: str, index: int) -> Gpu:
    memory = draw(st.sampled_from([24, 48, 80])) * GB
    version = draw(st.sampled_from([None, 3.0, 4.0, 4.0, 4.0]))
    fault = draw(st.sampled_from([None, None, None, "its fabric is down"]))
    clique = draw(st.sampled_from([None, None, ("rack", 1)]))
    mig = (Mig(f"M-{name}-{index}-0", memory // 2), Mig(f"M-{name}-{index}-1", memory // 2))
    parts = mig if draw(st.integers(0, 7)) == 0 else ()
    uuid = f"G-{name}-{index}"
    return Gpu(index, uuid, "Test GPU", memory, nvlink_version=version, fault=fault, clique=clique, mig=parts)


@st.composite
def nodes(draw: st.DrawFn, name: str, most: int = 4) -> Topology:
    found = tuple(draw(gpus(name, index)) for index in range(draw(st.integers(1, most))))
    joins = {pair: draw(joints) for pair in combinations(range(len(found)), 2)}
    return Topology(name, found, joins)


joints = st.builds(
    Join, st.sampled_from([0, 4, 4]), st.sampled_from(["PIX", "SYS"]), st.sampled_from([None, None, "down"])
)
clusters = st.tuples(nodes("a"), nodes("b", 3)) | st.tuples(nodes("a"))
pools = st.builds(
    DraftDemand,
    tenant=st.sampled_from(["chat", "code"]),
    drafter=st.sampled_from(["small", "large"]),
    method=st.just("model"),
    light=st.booleans(),
    weights=st.sampled_from([2, 15, 30]).map(lambda size: size * GB),
    kv=st.just(GB),
    wish=st.sampled_from(["auto", "auto", "split", "same-gpu"]),
    workers=st.integers(1, 2),
)
demands = st.builds(
    Demand,
    st.builds(
        TargetDemand,
        st.just("target"),
        replicas=st.integers(1, 3),
        tensor_parallel=st.integers(1, 3),
        weights=st.sampled_from([10, 30]).map(lambda size: size * GB),
        kv=st.just(4 * GB),
    ),
    st.lists(pools, max_size=3, unique_by=lambda pool: (pool.tenant, pool.drafter)).map(tuple),
)


@given(clusters, demands)
@settings(max_examples=150)
def test_nothing_is_over_committed(topologies: Sequence[Topology], asked: Demand) -> None:
    used: defaultdict[str, float] = defaultdict(float)
    targets = Counter[str]()
    for placed in plan(topologies, asked).placements:
        for uuid in placed.uuids:
            used[uuid] += placed.memory_fraction or 0
            targets[uuid] += placed.role == "target"
    assert all(share <= 0.9 + 1e-9 for share in used.values())
    assert all(count <= 1 for count in targets.values())


@given(clusters, demands)
@settings(max_examples=150)
def test_each_gets_the_bytes_it_needs(topologies: Sequence[Topology], asked: Demand) -> None:
    memory = {gpu.uuid: gpu.memory for topology in topologies for gpu in topology.gpus}
    memory |= {mig.uuid: mig.memory for t in topologies for gpu in t.gpus for mig in gpu.mig}
    pool = {(draft.tenant, draft.drafter): draft for draft in asked.drafts}
    for placed in plan(topologies, asked).placements:
        need = asked.target.need if placed.role == "target" else 0
        if placed.role == "draft" and placed.memory_fraction:
            need = pool[placed.tenant or "", placed.drafter or ""].need
        for uuid in placed.uuids:
            assert (placed.memory_fraction or 0) * (memory[uuid] or 0) >= need - 1


@given(clusters, demands)
@settings(max_examples=150)
def test_each_demand_is_placed_or_explained_once(topologies: Sequence[Topology], asked: Demand) -> None:
    made = plan(topologies, asked)
    placed = Counter(f"target target replica {target.replica}" for target in targets_of(made))
    workers = {(pool.tenant, pool.drafter): pool.workers for pool in asked.drafts}
    for draft in drafts_of(made):
        if draft.worker < workers[draft.tenant or "", draft.drafter or ""]:
            placed[f"draft {draft.drafter} of tenant {draft.tenant} worker {draft.worker}"] += 1
    placed.update(missing.what for missing in made.unplaced)
    wanted = Counter(f"target target replica {number}" for number in range(asked.target.replicas))
    for pool in (pool for pool in asked.drafts if targets_of(made) or not pool.light):
        wanted.update(f"draft {pool.drafter} of tenant {pool.tenant} worker {i}" for i in range(pool.workers))
    assert placed == wanted
    assert all(missing.reason and missing.needs for missing in made.unplaced)


@given(clusters, demands)
@settings(max_examples=150)
def test_pairs_and_groups_are_linked_unless_forced(topologies: Sequence[Topology], asked: Demand) -> None:
    made, by_name = plan(topologies, asked), {topology.node: topology for topology in topologies}
    fabrics = fabric_islands(topologies)
    forced = {(pool.tenant, pool.drafter) for pool in asked.drafts if pool.wish == "split"}
    target = {placed.replica: placed for placed in targets_of(made)}
    for placed in target.values():
        for a, b in combinations(placed.gpus, 2):
            assert linked(by_name[placed.node], a, b, 0.0)
    for draft in drafts_of(made):
        if draft.mode != "split" or (draft.tenant, draft.drafter) in forced:
            continue
        lead = target[draft.replica]
        if draft.node == lead.node:
            assert linked(by_name[lead.node], lead.gpus[0], draft.gpus[0], asked.min_nvlink_version)
        else:
            ends = {(lead.node, lead.gpus[0]), (draft.node, draft.gpus[0])}
            assert any(ends <= set(fabric) for fabric in fabrics)


@given(clusters, demands, st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_the_order_of_nodes_and_gpus_does_not_matter(
    topologies: Sequence[Topology], asked: Demand, random: object
) -> None:
    turned = [replace(topology, gpus=topology.gpus[::-1]) for topology in reversed(topologies)]
    assert plan(turned, asked) == plan(topologies, asked) == plan(topologies, asked)


@given(clusters, demands, st.data())
@settings(max_examples=300)
def test_more_hardware_never_places_less(
    topologies: Sequence[Topology], asked: Demand, data: st.DataObject
) -> None:
    """Replicas come first; with as many of them, no fewer drafts."""
    if data.draw(st.booleans()):
        more = [*topologies, data.draw(nodes("c", 2))]
    else:
        grown = topologies[0]
        index = len(grown.gpus)
        joins = {**grown.joins, **{(i, index): data.draw(joints) for i in range(index)}}
        gpu = data.draw(gpus("a", index))
        more = [replace(grown, gpus=(*grown.gpus, gpu), joins=joins), *topologies[1:]]
    assert counts(plan(more, asked), asked) >= counts(plan(topologies, asked), asked)


def counts(made: Plan, asked: Demand) -> tuple[int, int]:
    missing = sum(one.what.startswith("draft") for one in made.unplaced)
    return len(targets_of(made)), sum(pool.workers for pool in asked.drafts) - missing


def test_a_draft_that_would_block_a_later_replica_is_seen_at_once() -> None:
    """Else the search would try all ways for the replicas between the two, which takes time without end."""
    whole = [node(f"n{i}", 4, all_pairs(4)) for i in range(6)]
    hw = hardware([*whole, node("large", 8, all_pairs(8)), node("single", 1)], 4.0)
    sites, asked = Sites(hw, demand(replace(DRAFT, workers=8), replicas=8, parallel=4)), list[Item]()

    def options(item: Item, state: State) -> Iterator[State]:
        asked.append(item)
        return sites.options(item, state)

    assert best(sites.items, sites.start(), options, 1000).placed == len(sites.items) == len(asked) == 16


SAME = replace(DRAFT, drafter="large", tenant="x", weights=50 * GB, wish="same-gpu", workers=3)
TWO = [replace(DRAFT, tenant=tenant, workers=2) for tenant in ("chat", "code")]
FORCED = replace(DRAFT, drafter="large", tenant="x", weights=GB, wish="split", workers=3)
THREE = [replace(DRAFT, tenant=tenant, weights=30 * GB, workers=3) for tenant in ("chat", "code")]


@pytest.mark.parametrize(
    ("sizes", "need", "drafts"),
    [([80], 10, (*TWO, SAME)), ([24, 80, 48, 24], 10, (*TWO, SAME)), ([48, 80], 14, (FORCED, *THREE))],
)
def test_a_wrong_first_choice_is_taken_back(
    sizes: list[int], need: int, drafts: Sequence[DraftDemand]
) -> None:
    """The target must lead on the largest GPU, which looks no better than others."""
    made = plan([of_memory(sizes, all_pairs(len(sizes)))], demand(*drafts, need=need))
    assert made.unplaced == ()
    assert targets_of(made)[0].gpus == (sizes.index(80),)


def test_ways_with_fewer_departures_come_first() -> None:
    """Items choose a digit each, 0 is preferred. A depth-first search would find 0011 first."""

    @dataclass(frozen=True)
    class Way:
        digits: str = ""
        placed: int = 0

    def options(item: int, way: Way) -> Iterator[Way]:
        for digits in (way.digits + digit for digit in "012"):
            yield Way(digits, way.placed + (item < 3 or digits in ("0011", "0111", "2001")))

    assert best(range(4), Way(), options, 1000).digits == "2001"
    assert best(range(4), Way(), options, 5).digits == "0000"


def test_draft_gpus_are_divided_fairly_among_many_replicas() -> None:
    """256 GPUs, 128 of them targets'; a draft GPU holds two drafts, a target's none."""
    whole = [node(f"n{i:02}", 8, all_pairs(8)) for i in range(32)]
    wanted = [replace(DRAFT, tenant=f"t{i}", workers=64, weights=30 * GB) for i in range(4)]
    made = plan(whole, demand(*wanted, replicas=128, need=50))
    assert (len(targets_of(made)), len(drafts_of(made))) == (128, 256)


# Pools that may grow


def test_a_pool_that_may_grow_gets_room_where_some_is_left() -> None:
    growing = replace(DRAFT, workers=1, max_workers=3)
    made = plan([node("a", 4, all_pairs(4))], demand(growing))
    first, *further = drafts_of(made)
    assert not first.spare and [draft.spare for draft in further] == [True, True]
    assert {gpu for placed in made.placements for gpu in placed.gpus} == {0, 1, 2, 3}
    assert further[0].reason.startswith("room for a worker when the pool grows: GPU ")
    assert first.memory_fraction == pytest.approx(0.9)


def test_room_for_growth_takes_nothing_from_what_must_be() -> None:
    growing = replace(DRAFT, workers=1, max_workers=4)
    other = replace(DRAFT, tenant="code")
    node_of_four = [node("a", 4, all_pairs(4))]
    made = plan(node_of_four, demand(growing, other))
    without = plan(node_of_four, demand(replace(growing, max_workers=0), other))
    assert [placed for placed in made.placements if not placed.spare] == list(without.placements)
    assert sum(placed.spare for placed in made.placements) == 1
    assert any("pool of chat for small: room for 2 workers, of at most 4" in note for note in made.notes)
    assert made.unplaced == ()


def test_a_drafter_in_the_targets_process_does_not_grow() -> None:
    made = plan([node("a", 4)], demand(replace(DRAFT, max_workers=3)))
    assert only_draft(made).mode == "same-gpu"


def test_on_cpus_a_split_pool_has_room_for_all_its_workers() -> None:
    growing = replace(DRAFT, wish="split", workers=1, max_workers=3)
    made = plan([], demand(growing, replicas=2))
    assert [(d.worker, d.replica, d.spare) for d in drafts_of(made)] == [
        (0, 0, False),
        (2, 0, True),
        (1, 1, True),
    ]
