"""The whole way of a timed run with a made-up timer: budget, memory, failures, comparisons, report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gammaray.errors import ConfigError, GammarayError
from gammaray.kernels.bench import command, output
from gammaray.kernels.bench.case import SEED, Case, Comparison, Ready, Roofs
from gammaray.kernels.bench.check import Planned
from gammaray.kernels.bench.report import Report
from gammaray.kernels.bench.run import Budget, Found, measure
from gammaray.kernels.bench.timing import roofs

ROOFS = Roofs(copied=100.0, operations=1000.0)
CPU = torch.device("cpu")


class Clock:
    """Goes on when something is timed."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeTimer:
    """Runs once; one second passes; 10, 11, 12, ... microseconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.us = clock, 9.0

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        self.clock.now += 1
        self.us += 1
        return self.us


def case(
    name: str,
    *comparisons: Comparison,
    error: float = 0.0,
    memory: int = 0,
    run: Callable[[], torch.Tensor] = lambda: torch.ones(1),
) -> Case:
    ready = Ready(run, lambda result: error * float(result))
    sizes = {"name": name, "batch": 2}
    return Case("probe", sizes, 500, 2000, memory, 0.1, lambda: ready, comparisons, seconds=2.0)


def other(name: str, seconds: float, order: list[str]) -> Comparison:
    return Comparison(name, seconds, lambda: lambda: order.append(name))


def measured(*cases: Case, limit_s: float = 100.0) -> Found:
    clock = Clock()
    return measure(cases, FakeTimer(clock), ROOFS, 1000, Budget(limit_s, clock))


def raising(problem: Exception) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        raise problem

    return run


def test_a_row_holds_floor_and_shares() -> None:
    (row,) = measured(case("a")).rows
    assert (row.us, row.floor_us, row.bandwidth, row.peak) == (10.0, 5.0, 0.5, 0.2)
    assert row.as_json() == {
        "kernel": "probe",
        "shape": "a batch 2",
        "name": "a",
        "batch": 2,
        "us": 10.0,
        "floor_us": 5.0,
        "ratio_to_floor": 2.0,
        "share_of_bf16_peak": 0.2,
        "max_rel_err": 0.0,
    }


def test_what_time_does_not_allow_is_listed() -> None:
    """Each case claims 2 s and takes 1, so 3.5 s hold two of them, and one comparison that claims 1 s."""
    order: list[str] = []
    found = measured(*(case(name, other("sdpa", 1.0, order)) for name in "abc"), limit_s=3.5)
    assert [row.case.sizes["name"] for row in found.rows] == ["a", "b"]
    assert [(one.what, one.reason) for one in found.skipped] == [
        ("probe c batch 2", "out of time"),
        ("sdpa b batch 2", "out of time"),
    ]
    assert order == ["sdpa"]


def test_what_memory_does_not_allow_is_listed() -> None:
    found = measured(case("a", memory=2 * 2**30), case("b", run=raising(torch.OutOfMemoryError())))
    assert [one.reason for one in found.skipped] == ["needs 2.0 GiB, 0.0 are free", "out of memory"]
    assert (found.rows, found.failed) == ([], [])


def test_dear_comparisons_come_last_and_may_fail() -> None:
    order: list[str] = []
    flex = other("flex", 9.0, order)
    broken = Comparison("broken", 1.0, lambda: raising(RuntimeError("a\nno kernel")))
    found = measured(case("a", flex, other("sdpa", 1.0, order)), case("b", other("sdpa", 1.0, order), broken))
    assert order == ["sdpa", "sdpa", "flex"]
    assert [set(row.others) for row in found.rows] == [{"sdpa", "flex"}, {"sdpa"}]
    assert [one.reason for one in found.skipped] == ["RuntimeError: no kernel"]
    assert found.failed == []


def test_a_kernel_that_raises_or_errs_is_a_failure_and_the_rest_goes_on() -> None:
    cases = [case("a", run=raising(RuntimeError("bad"))), case("b", error=float("nan")), case("c", error=0.2)]
    good = case("d", error=0.1)
    done = [Planned("sum", 0.5, lambda: 0.7), Planned("broken", 0.5, raising_float)]
    report = command.with_times(CPU, done, [*cases, good], small(FakeTimer(Clock())), 1000, Budget(100))
    assert [line.partition(":")[0] for line in report.failed] == [
        "sum",
        "broken",
        "probe b batch 2",
        "probe c batch 2",
        "probe a batch 2",
    ]
    assert "FAILED probe a batch 2: RuntimeError: bad" in report.as_markdown()
    assert "NaN" not in output.to_json(report) and "Infinity" not in output.to_json(report)


def raising_float() -> float:
    raise ValueError("no")


def small(timer: FakeTimer) -> Callable[[Callable[[], object]], float]:
    """For `roofs`, whose tensors are made for a GPU: what is timed is not run."""
    return lambda run: timer(lambda: None)


@pytest.fixture(autouse=True)
def small_roofs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(command, "roofs", lambda timer, device: roofs(timer, device, copied=64, side=4))
    yield


def test_roofs_count_both_ways_and_two_operations() -> None:
    found = roofs(FakeTimer(Clock()), CPU, copied=500, side=10)
    assert (found.copied, found.operations) == (2 * 500 / 10, 2 * 1000 / 11)


def test_the_report_has_the_promised_shape(tmp_path: Path) -> None:
    order: list[str] = []
    report = command.with_times(
        CPU, [], [case("a", other("sdpa", 1.0, order))], FakeTimer(Clock()), 1000, Budget(100)
    )
    files = [tmp_path / "found.json", tmp_path / "found.md"]
    output.write(report, files)
    data = json.loads(files[0].read_text())
    assert {"device", "versions", "rows", "skipped", "goals", "checks", "measured", "failed"} <= set(data)
    (row,) = data["rows"]
    assert {"kernel", "shape", "us", "floor_us", "ratio_to_floor", "max_rel_err", "sdpa_us"} <= set(row)
    assert {"commit", "torch", "triton", "cuda"} <= set(data["versions"])
    assert "| probe | a batch 2 | 12.0 |" in files[1].read_text()
    assert report.failed == []


def test_comparisons_of_goal_shapes_follow_their_row() -> None:
    """At the end they would be what a short time drops first, and they are what the goals are about."""
    order: list[str] = []
    cases = [
        case("a", other("sdpa a", 1.0, order), run=noted("a", order)),
        replace(case("b", other("sdpa b", 1.0, order), run=noted("b", order)), goal=True),
        replace(case("c", other("sdpa c", 1.0, order), run=raising(RuntimeError())), goal=True),
        case("d", run=noted("d", order)),
    ]
    found = measured(*cases)
    assert list(dict.fromkeys(order)) == ["a", "b", "sdpa b", "d", "sdpa a"]
    assert [set(row.others) for row in found.rows] == [{"sdpa a"}, {"sdpa b"}, set()]


def noted(name: str, order: list[str]) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        order.append(name)
        return torch.ones(1)

    return run


def test_a_report_without_a_gpu_has_its_goals_and_its_seed_in_both_forms() -> None:
    report = command.without_times(CPU, [], [case("a")], Budget(100))
    goals, text = report.as_json()["goals"], report.as_markdown()
    assert isinstance(goals, list) and len(goals) == 5
    assert all(f"| {goal['goal']} | not measured | 0 of 0 |" in text for goal in goals)
    assert report.as_json()["seed"] == SEED and f"Seed: {SEED}" in text.splitlines()


def test_each_check_and_each_row_begins_with_the_seed() -> None:
    """Whatever ran before, so that a failure can be had again."""
    planned = Planned("draw", 1.0, lambda: float(torch.rand(())))
    torch.manual_seed(1)
    first, (row,) = planned.run(), measured(case("a", run=lambda: torch.rand(1), error=1.0)).rows
    again, (other_row,) = planned.run(), measured(case("a", run=lambda: torch.rand(1), error=1.0)).rows
    assert (first.error, row.error) == (again.error, other_row.error)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("found.csv", r"\.csv is neither"),
        ("missing/found.json", "No such file or directory"),
        ("folder.md", "Is a directory"),
        ("file/found.json", "Not a directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.md").mkdir()
    (tmp_path / "file").touch()
    for slow in ("this_machine", "compiled"):
        monkeypatch.setattr(command, slow, lambda: pytest.fail("it was measured"))
    before = sorted(tmp_path.rglob("*"))
    for compile_only in (False, True):
        with pytest.raises(ConfigError, match=says) as refused:
            command.run([tmp_path / "good.json", tmp_path / name], compile_only, as_json=False)
        assert len(str(refused.value).splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before, "what was made to try is gone"


def test_trying_a_file_leaves_what_is_in_it_and_a_link(tmp_path: Path) -> None:
    (tmp_path / "old.md").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "new.json")
    output.check([tmp_path / "old.md", tmp_path / "link.json"])
    assert (tmp_path / "old.md").read_text() == "old"
    assert (tmp_path / "link.json").is_symlink() and not (tmp_path / "new.json").exists()


def test_a_report_that_can_no_longer_be_written_was_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured_meanwhile() -> Report:
        folder.rmdir()
        return command.without_times(CPU, [], [case("a")], Budget(100))

    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.delenv("GAMMARAY_KERNELS", raising=False)
    monkeypatch.setattr(command, "this_machine", measured_meanwhile)
    with pytest.raises(GammarayError, match="No such file"):
        command.run([folder / "found.md"], False, as_json=False)
    assert "probe: 1 shapes" in capsys.readouterr().out


@pytest.mark.parametrize("compile_only", [False, True])
@pytest.mark.parametrize("value", ["torch", "bogus"])
def test_another_backend_is_refused(value: str, compile_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silently overruled, somebody would take these numbers for torch's."""
    monkeypatch.setenv("GAMMARAY_KERNELS", value)
    with pytest.raises(ConfigError, match=f"GAMMARAY_KERNELS is '{value}': unset it, or use auto or fused"):
        command.run([], compile_only, as_json=False)
