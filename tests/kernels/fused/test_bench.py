"""`gammaray bench kernels` with real kernels, interpreted: what it checks and times is right.

Were the inputs of a case wrong, or its truth, the first run on a GPU would say that a good kernel fails, or
time something that serving does not do.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gammaray.kernels import cpu
from gammaray.kernels.bench import attention, check, command, joining, moves, verification
from gammaray.kernels.bench.attention import Pools
from gammaray.kernels.bench.case import Case, Heads, Roofs
from gammaray.kernels.bench.run import Budget, measure
from gammaray.kernels.fused import launch, move, resources
from gammaray.kernels.fused.resources import Usage

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
    assert len(done) == 8


def test_a_wrong_kernel_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    real = launch.paged_tree_attention

    def shifted(*arguments: object, **named: object) -> Tensor:
        return real(*arguments, **named).roll(1, 1)  # type: ignore[arg-type]  # heads in another order

    monkeypatch.setattr(launch, "paged_tree_attention", shifted)
    monkeypatch.setattr(move, "move_kv", lambda *_: None)
    failed = [one.check.partition(",")[0] for one in map(check.Planned.run, check.checks(CPU)) if not one.ok]
    assert failed == ["attention", "attention", "kv_move"]


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_wrong_tokens_are_counted(rule: str) -> None:
    """Of two jobs one emits another token behind its path: half of them are wrong."""
    ready = small(rule, filters=False).prepare()
    storage = ready.run().clone()
    assert ready.error(storage) == 0.0
    tokens = verification.VerifyResult.of(storage, 3)
    tokens.tokens[0, int(tokens.accepted[0])] += 1
    assert ready.error(storage) == 0.5


def test_the_gate_s_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good = Usage("attention", 90, 4, 128, 0, 0, 1024, 1.0)
    bad = Usage("attention", 80, 4, 255, 8, 8, 1024, 1.0)
    for usages, code in ([good], 0), ([good, bad], 1):
        monkeypatch.setattr(resources, "measure", lambda usages=usages: usages)
        assert command.compile_all(as_json=True) == code
        assert [entry["spill_stores"] for entry in json.loads(capsys.readouterr().out)] == [0, 8][
            : len(usages)
        ]
