"""The parts around Ray that need no cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorDiedError, RayTaskError, TaskUnschedulableError
from ray.serve.exceptions import BackPressureError

from gammaray.actors import target
from gammaray.actors.client import as_ours
from gammaray.actors.draft import Post
from gammaray.actors.target import ReplicaSettings, TargetReplica
from gammaray.cluster import drafts, local
from gammaray.cluster.stop import Stopped
from gammaray.config import Controller, load, parse
from gammaray.engine.threads import quota, usable_cores
from gammaray.errors import ConfigError, EngineFailure, GammarayError, InvalidRequest, Overloaded, ReplicaLost
from gammaray.types import GenerateRequest, Health, ModelInfo, TokenChunk


class Engine:
    info = ModelInfo("tiny", 10, 10, "float32", "cpu", ())

    def __init__(self) -> None:
        self.threads = os.environ["OMP_NUM_THREADS"]
        self.events: list[str] = []
        self.state = "ok"

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        if request.request_id == "odd":
            raise RuntimeError("cannot verify token 4711")
        try:
            for position in range(5):
                yield TokenChunk(request.request_id, 0, position, (1,), "x")
            self.events.append("finished")
        except (GeneratorExit, asyncio.CancelledError):
            self.events.append("aborted")
            raise

    def health(self) -> Health:
        return Health(self.state, 1.0, 0, 0, 0, 9)

    def check_health(self) -> None:
        raise EngineFailure("stuck")

    def shutdown(self) -> None:
        self.events.append("shut down")


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> TargetReplica:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # and put back afterwards
    monkeypatch.setattr(target, "session_folder", lambda: None)  # there is no session of Ray's
    config = parse({"target": {"model": "tiny"}, "controller": {"enabled": False}}, "test")
    return TargetReplica(config, lambda *_: Engine(), ReplicaSettings(threads=7, loopback=False))


def test_what_an_unexpected_error_says_does_not_leave(replica: TargetReplica) -> None:
    """Serve records it, with its causes, in spans."""

    async def read() -> None:
        await anext(replica.generate(GenerateRequest("odd", (1,))))

    with pytest.raises(EngineFailure, match="the engine failed: RuntimeError") as failure:
        asyncio.run(read())
    assert "4711" not in "".join(traceback.format_exception(failure.value))


@pytest.mark.parametrize("leave", ["finish", "close", "cancel"])
def test_a_stream_that_ends_early_aborts(replica: TargetReplica, leave: str) -> None:
    async def read() -> None:
        stream = replica.generate(GenerateRequest("r", (1,)))
        await anext(stream)
        if leave == "finish":
            assert len([chunk async for chunk in stream]) == 4
        elif leave == "close":
            await stream.aclose()
        else:  # what Serve does when the reader goes away
            with pytest.raises(asyncio.CancelledError):
                await stream.athrow(asyncio.CancelledError())

    asyncio.run(read())
    assert replica._engine.events == ["finished" if leave == "finish" else "aborted"]


def test_replica_passes_threads_and_health(replica: TargetReplica) -> None:
    assert replica._engine.threads == "7"
    with pytest.raises(EngineFailure):
        replica.check_health()
    engine = replica._engine
    replica.__del__()
    assert engine.events == ["shut down"]


def test_a_replica_whose_engine_serves_nobody_says_so(replica: TargetReplica) -> None:
    assert asyncio.run(replica.info()) is Engine.info
    assert asyncio.run(replica.health()).kv_total_blocks == 9
    replica._engine.state = "stuck"
    with pytest.raises(ReplicaLost, match="stuck"):
        asyncio.run(replica.info())
    assert asyncio.run(replica.health()).state == "stuck"


def test_logs_stay_as_they_are_outside_a_replica(replica: TargetReplica) -> None:
    assert logging.getLogger("gammaray").propagate


def task_error(cause: Exception) -> Exception:
    return RayTaskError("generate", "traceback", cause).as_instanceof_cause()


def grpc_error(code: StatusCode) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata())


def test_our_errors_come_out_of_ray_as_they_went_in() -> None:
    went = InvalidRequest("too long", param="prompt", code="c")
    came = as_ours(task_error(went))
    assert type(came) is InvalidRequest
    assert (came.message, came.param, came.code) == ("too long", "prompt", "c")
    assert as_ours(went) is went


def test_rays_errors_become_ours() -> None:
    busy = as_ours(BackPressureError(5, 4, retry_after_s=7.0))
    assert isinstance(busy, Overloaded) and busy.retry_after == 7.0
    assert not isinstance(busy, ReplicaLost)
    for gone in (ActorDiedError(), grpc_error(StatusCode.UNAVAILABLE), grpc_error(StatusCode.CANCELLED)):
        assert isinstance(as_ours(gone), ReplicaLost)
    assert type(as_ours(grpc_error(StatusCode.RESOURCE_EXHAUSTED))) is EngineFailure
    assert isinstance(as_ours(task_error(ReplicaLost("stuck"))), ReplicaLost)
    assert type(as_ours(task_error(KeyError("secret")))) is EngineFailure
    assert "secret" not in str(as_ours(task_error(KeyError("secret"))))
    assert type(as_ours(TaskUnschedulableError("no room"))) is EngineFailure


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", None), ("200000 100000", 2), ("50000 100000", 1), ("", None), ("x y", None)],
)
def test_cgroup_quota(tmp_path: Path, text: str, cores: int | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text)
    assert quota(file) == cores
    assert quota(tmp_path / "missing") is None


def test_usable_cores_are_not_more_than_there_are() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_a_cluster_of_our_own_is_closed_and_leaves_home_alone() -> None:
    mine = local.environment({}, local=True)
    assert mine["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert mine["RAY_USAGE_STATS_ENABLED"] == "0"
    assert len(mine["RAY_AUTH_TOKEN"]) == 64
    assert mine["RAY_AUTH_TOKEN"] != local.environment({}, local=True)["RAY_AUTH_TOKEN"]


def test_a_cluster_that_would_not_be_closed_is_refused() -> None:
    name, closed = local.LOOPBACK
    local.check_loopback({}, {})
    local.check_loopback({name: closed}, {"ray"})
    for current, imported in (({}, {"ray"}), ({name: "1"}, set())):
        with pytest.raises(GammarayError, match="before ray is imported"):
            local.check_loopback(current, imported)


@pytest.mark.parametrize("name", local.AUTH)
def test_what_the_user_set_stays(name: str) -> None:
    assert not set(local.AUTH) & set(local.environment({name: "x"}, local=True))
    assert "RAY_SERVE_USE_GRPC_BY_DEFAULT" not in local.environment(
        {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "0"}, local=True
    )


def test_a_foreign_cluster_keeps_its_own_network() -> None:
    assert set(local.environment({}, local=False)) == {"RAY_USAGE_STATS_ENABLED", "RAY_SERVE_LOG_TO_STDERR"}


class Staff:
    """Draft workers that come up one a question; `lost` says why one did not."""

    def __init__(self, lost: dict[str, str] | None = None) -> None:
        self.asked, self.lost = 0, lost or {}

    def reports(self) -> dict[tuple[str, str], list[str]]:
        self.asked += 1
        return {("bank", "small"): ["a report"] * (self.asked - 1)}

    def troubles(self) -> dict[str, str]:
        return self.lost


def wait(staff: Staff, workers: int = 2, check: Callable[[], None] = lambda: None) -> list[str]:
    """What was said."""
    model = {"method": "model", "model": "tiny"}
    bank = {"drafter": "small", "pool": {"workers": workers, "max_workers": 3}}
    tree = {"target": {"model": "big"}, "drafters": {"small": model}, "tenants": {"bank": bank}}
    said: list[str] = []
    posts = [Post("bank", "small", "1", worker) for worker in range(3)]
    drafts.wait(staff, parse(tree, "test"), posts, check, said.append)
    return said


def test_a_start_waits_for_draft_workers_but_not_for_spare_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "POLL_S", 0.0)
    staff = Staff()
    assert wait(staff) == []
    assert staff.asked == 3


def test_a_worker_that_was_lost_does_not_stop_a_start() -> None:
    lost = Staff({"draft one": "ActorDiedError: ...\nOutOfMemoryError: no room\n"})
    assert wait(lost) == ["warning: draft one was lost and is started again: OutOfMemoryError: no room"]


def test_a_drafter_that_does_not_fit_stops_a_start() -> None:
    report = "ActorDiedError: died\n  File ...\ngammaray.errors.VocabularyMismatch: 20 tokens, not 10\n"
    with pytest.raises(ConfigError, match=r"^20 tokens, not 10$"):
        wait(Staff({"draft one": report}))


def test_a_signal_ends_the_wait_for_draft_workers() -> None:
    with pytest.raises(Stopped):
        wait(Staff(), check=stopped)


def stopped() -> None:
    raise Stopped


def test_the_ingress_is_lost_only_with_the_proxy_itself() -> None:
    from gammaray.cluster.app import build

    ingress = build(load(), loopback=True)._bound_deployment
    assert ingress.name == "ingress"
    assert ingress.ray_actor_options == {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}


def test_an_audit_log_that_cannot_be_written_stops_the_start_before_ray_begins(tmp_path: Path) -> None:
    local.check_audit_log(Controller(audit_log=str(tmp_path / "audit.jsonl")))
    local.check_audit_log(Controller())
    nowhere = str(tmp_path / "missing" / "audit.jsonl")
    local.check_audit_log(Controller(enabled=False, audit_log=nowhere))
    with pytest.raises(ConfigError, match=r"controller.audit_log: cannot write .*No such file"):
        local.check_audit_log(Controller(audit_log=nowhere))
