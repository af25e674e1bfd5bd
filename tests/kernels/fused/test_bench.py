"""`gammaray bench kernels` with real kernels, interpreted: what it checks and times is right.

Were the inputs of a case wrong, or its truth, the first run on a GPU would say that a good kernel fails, or
time something that serving does not do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gammaray.kernels import cpu
from gammaray.kernels.bench import attention, check, command, drafts, joining, moves, verification
from gammaray.kernels.bench.attention import Pools
from gammaray.kernels.bench.case import SEED, Case, Heads, Roofs
from gammaray.kernels.bench.run import Budget, measure
from gammaray.kernels.fused import launch, logits, move, resources, thresholds, walk
from gammaray.kernels.fused.resources import Usage
from gammaray.kernels.verification import Job, Node, VerifyBatch, VerifyWorkspace

CPU = torch.device("cpu")
TINY = Heads("tiny", 6, 2, 16)
ROOFS = Roofs(1.0, 1.0)


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels, and nothing else: the torch path would be right, too."""
    torch.manual_seed(0)
    monkeypatch.setenv("GAMMARAY_KERNELS", "fused")
    monkeypatch.setattr(cpu, "paged_tree_attention", None)


def once(run: Callable[[], object]) -> float:
    run()
    return 10.0


def small(rule: str, filters: bool) -> Case:
    shape = verification.Shape(rule, 2, 3, filters, vocab=4200, dtype=torch.float32)
    return verification.case(shape, CPU)


def test_every_kind_of_case_runs_and_is_right() -> None:
    """The way that rows of a GPU take, at sizes that an interpreter can do."""
    shapes = [attention.Shape(TINY, 2, 40, nodes) for nodes in (1, 5)]
    pools = Pools(CPU, torch.float32)  # a bfloat16 product is wrong in the interpreter
    cases = [
        *(attention.case(shape, pools) for shape in shapes),
        moves.move_case(TINY, 2, 3, CPU),
        moves.rope_case(TINY, 3, CPU),
        joining.case(TINY, 2, 4, CPU),
        small("rejection", filters=True),
    ]
    found = measure(cases, once, ROOFS, 2**40, Budget(1e9))
    assert (found.failed, found.skipped) == ([], [])
    assert [row.case.kernel for row in found.rows if row.correct] == [case.kernel for case in cases]
    assert all(row.others["sdpa"] == 10.0 for row in found.rows if row.case.kernel == "attention")


def test_all_checks_pass() -> None:
    done = [planned.run() for planned in check.checks(CPU)]
    assert [one for one in done if not one.ok] == []
    assert len(done) == 11


def test_a_wrong_kernel_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    real = launch.paged_tree_attention

    def shifted(*arguments: object, **named: object) -> Tensor:
        return real(*arguments, **named).roll(1, 1)  # type: ignore[arg-type]  # heads in another order

    monkeypatch.setattr(launch, "paged_tree_attention", shifted)
    monkeypatch.setattr(move, "move_kv", lambda *_: None)
    planned = [one for one in check.checks(CPU) if not one.check.startswith("verification")]
    failed = [one.check.partition(",")[0] for one in map(check.Planned.run, planned) if not one.ok]
    assert failed == ["attention", "attention", "move"]


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_wrong_tokens_are_counted(rule: str) -> None:
    """Of two jobs one emits another token behind its path: half of them are wrong."""
    ready = small(rule, filters=False).prepare()
    storage = ready.run().clone()
    assert ready.error(storage) == 0.0
    tokens = verification.VerifyResult.of(storage, 3)
    tokens.tokens[0, int(tokens.accepted[0])] += 1
    assert ready.error(storage) == 0.5


@pytest.mark.parametrize(
    ("module", "name", "planted"),
    [
        (thresholds, "cut", "cuts"),
        (logits, "constrain", "edits"),
        (walk, "walk", "siblings"),
    ],
)
def test_a_wrong_step_of_verification_fails_the_check_of_trees(
    module: ModuleType, name: str, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filters that keep one token too few, penalties and bias left out, siblings that nobody looks at."""
    real = getattr(module, name)

    def wrong(
        rows: Tensor, slots: Tensor, batch: VerifyBatch, workspace: VerifyWorkspace, *more: bool
    ) -> None:
        if planted == "edits":
            batch.jobs[Job.EDITS_END] = batch.jobs[Job.EDITS]
        if planted == "siblings":
            parents = batch.nodes[Node.PARENT]
            batch.nodes[Node.PARENT, 1:][parents[1:] == parents[:-1]] = 63
        real(rows, slots, batch, workspace, *more)
        if planted == "cuts":
            workspace.cuts[0] -= 1

    monkeypatch.setattr(module, name, wrong)
    trees = [kind for kind in drafts.kinds(CPU) if kind.vocab == 40]
    assert max(share_wrong(kind) for kind in trees) > 0.1


def share_wrong(kind: drafts.Kind) -> float:
    torch.manual_seed(SEED)
    return drafts.share_wrong(kind, CPU)


def test_the_gate_s_report_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good = Usage("attention", 90, 4, 128, 0, 0, 1024, 1.0)
    bad = Usage("attention", 80, 4, 255, 8, 8, 1024, 1.0)
    files = [tmp_path / "found.json", tmp_path / "found.md"]
    for usages, code in ([good], 0), ([good, bad], 1):
        monkeypatch.setattr(resources, "measure", lambda usages=usages, **_: usages)
        assert command.run(files, compile_only=True, as_json=True) == code
        printed = json.loads(capsys.readouterr().out)
        assert printed == json.loads(files[0].read_text())
        assert set(printed) == {"triton", "variants"}
        problems = [entry["problems"] for entry in printed["variants"]]
        assert problems == [[], ["spills 8 bytes, reads back 8"]][: len(usages)]
    assert "PROBLEM attention on sm_80: spills 8 bytes" in files[1].read_text()


def test_progress_is_shown_in_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(progress: Callable[[int, int], None] | None) -> list[Usage]:
        for done in range(3):
            if progress:
                progress(done, 2)
        return [Usage("attention", 90, 4, 128, 0, 0, 1024, 1.0)]

    monkeypatch.setattr(resources, "measure", measure)
    for terminal, said in ((False, ""), (True, "\r0 of 2 compiled\r1 of 2 compiled\r2 of 2 compiled\n")):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        command.compiled()
        assert capsys.readouterr().err == said


def test_variants_are_called_by_their_files() -> None:
    """As in rows of the benchmark, and in its documentation."""
    for name in resources.kernel_modules():
        stem = name.rpartition(".")[2]
        assert {variant.name.split()[0].rstrip(",") for variant in import_module(name).variants()} == {stem}
