"""A tenant's pool of draft workers, seen from the replica: who gets which sequence, what a change costs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from support.rig import CLOSE, LEVEL_S, VERIFY_S, SimEngine, plainly, requests
from support.serving import eventually
from support.simlink import SECRET, SimWorker, draft_worker, remote

from gammaray.actors.link import pool as module
from gammaray.actors.link.channel import Address
from gammaray.actors.link.pool import NEAR_FIRST, Member, PoolDrafter
from gammaray.actors.link.remote import RemoteDrafter
from gammaray.engine.drafters.base import Drafter
from gammaray.engine.drafters.switch import TenantDrafter
from gammaray.engine.sim import SimClock


@dataclass
class Pool:
    """Simulated workers by name, and who of them is a member."""

    clock: SimClock
    workers: dict[str, SimWorker] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drafter = PoolDrafter(lambda: self.members, self._connect)

    def _connect(self, member: Member) -> RemoteDrafter:
        return remote(self.workers[str(member.address.place)], self.clock)

    def add(self, name: str, distance: int = 0) -> None:
        self.workers[name] = draft_worker(CLOSE, LEVEL_S)
        self.workers[name].clock.advance_to(self.clock())
        self.members.append(Member(Address(name, SECRET), distance))
        self.drafter.refresh()

    def change(self, name: str, draining: bool) -> None:
        self.members = [replace(m, draining=draining) if m.address.place == name else m for m in self.members]
        self.drafter.refresh()

    def remove(self, name: str) -> None:
        self.members = [m for m in self.members if m.address.place != name]
        self.drafter.refresh()

    def load(self, name: str) -> int:
        return self.workers[name].server.stats.sequences


def running(pool: Pool, drafter: Drafter | None = None, count: int = 4, tokens: int = 60) -> SimEngine:
    sim = SimEngine(pool.clock, drafter or pool.drafter)
    sim.driver.submit(requests(count=count, tokens=tokens))
    for _ in range(4):
        sim.step()
    return sim


def test_sequences_spread_over_workers_of_one_distance() -> None:
    pool = Pool(SimClock())
    pool.add("one")
    pool.add("two")
    running(pool)
    assert [pool.load("one"), pool.load("two")] == [2, 2]


def test_the_nearest_comes_first_until_it_has_many() -> None:
    pool = Pool(SimClock())
    pool.add("far", distance=1)
    pool.add("near")
    running(pool, count=NEAR_FIRST)
    assert [pool.load("near"), pool.load("far")] == [NEAR_FIRST, 0]
    pool = Pool(SimClock())
    pool.add("far", distance=1)
    pool.add("near")
    running(pool, count=NEAR_FIRST + 3)
    assert [pool.load("near"), pool.load("far")] == [NEAR_FIRST, 3]


def test_who_drains_keeps_its_sequences_and_gets_no_new_ones() -> None:
    pool = Pool(SimClock())
    pool.add("old")
    sim = running(pool, count=2)
    pool.add("new")
    pool.change("old", draining=True)
    sim.driver.submit(replace(r, request_id=f"late {r.request_id}") for r in requests(count=3))
    for _ in range(4):
        sim.step()
    assert [pool.load("old"), pool.load("new")] == [2, 3]


def test_a_version_switch_in_the_midst_of_texts_loses_nothing() -> None:
    pool = Pool(SimClock())
    pool.add("v1")
    sim = running(pool, tokens=80)
    pool.add("v2")
    pool.change("v1", draining=True)
    sim.step()
    pool.remove("v1")  # before its sequences have ended
    assert max(sim.step() for _ in range(4)) < VERIFY_S + 0.1
    assert pool.load("v2") == 4
    drafted = pool.workers["v2"].server.stats.drafts
    sim.finish()
    assert pool.workers["v2"].server.stats.drafts > drafted
    served = sum(worker.server.stats.drafts for worker in pool.workers.values())
    counts = pool.drafter.counts()
    assert (counts.workers, counts.losses, counts.drafts) == (1, 0, served)
    assert 0 < counts.hits < counts.drafts
    assert sim.texts() == plainly(requests(count=4, tokens=80))


def test_sequences_of_a_lost_worker_go_on_with_another() -> None:
    pool = Pool(SimClock())
    pool.add("one")
    pool.add("two")
    sim = running(pool, tokens=80)
    pool.workers["one"].faults.dead = True
    for _ in range(4):
        sim.step()
    assert pool.load("two") == 4
    sim.finish()
    assert sim.texts() == plainly(requests(count=4, tokens=80))


def test_a_pool_without_workers_decodes_plainly() -> None:
    pool = Pool(SimClock())
    sim = running(pool)
    assert sim.step() == pytest.approx(VERIFY_S)
    sim.finish()
    assert sim.texts() == plainly(requests(count=4))
    assert {one.fallback for report in sim.driver.reports for one in report.finished} == {"worker_lost"}


def test_a_tenant_never_uses_the_workers_of_another() -> None:
    clock = SimClock()
    bank, shop = Pool(clock), Pool(clock)
    bank.add("of the bank")
    shop.add("of the shop")
    drafter = TenantDrafter({"bank": bank.drafter, "shop": shop.drafter}, None)
    sim = SimEngine(clock, drafter)
    tenants = ["bank", "bank", "shop", "other"]
    batch = [replace(r, tenant=t) for r, t in zip(requests(count=4), tenants, strict=True)]
    sim.driver.submit(batch)
    for _ in range(4):
        sim.step()
    assert [bank.load("of the bank"), shop.load("of the shop")] == [2, 1]
    bank.workers["of the bank"].faults.dead = True
    for _ in range(3):
        sim.step()
    assert shop.load("of the shop") == 1
    sim.finish()
    assert sim.texts() == plainly(batch)


def test_members_that_are_not_known_for_a_while_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMBERS_S", 0.01)
    asked: list[int] = []

    def members() -> list[Member]:
        asked.append(len(asked))
        if len(asked) < 3:
            raise OSError("no answer")
        return []

    drafter = PoolDrafter(members, lambda member: remote(draft_worker(CLOSE, LEVEL_S), SimClock()))
    drafter.start()
    eventually(lambda: len(asked) > 3)
    drafter.close()


def test_a_resting_worker_gets_no_new_sequence_beside_another() -> None:
    pool = Pool(SimClock())
    pool.add("tired")
    pool.add("fresh", distance=1)
    link = pool.drafter._pool[Address("tired", SECRET)][1].link
    link._rest_until = pool.clock() + 10
    running(pool, count=2)
    assert [pool.load("tired"), pool.load("fresh")] == [0, 2]
