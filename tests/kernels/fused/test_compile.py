"""The compile gate: whatever the kernels can launch becomes machine code here, without a GPU, unspilled.

It catches what the interpreter cannot: a kernel that Triton's compiler refuses, a candidate of the tuner that
keeps more in registers than there are, or one that needs more shared memory than a block may have. `-s` shows
the table.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from triton import KernelInterface

from gammaray.kernels.fused import resources
from gammaray.kernels.fused.resources import GATED, UNTESTED, Compiled, Usage

TESTS = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def usages() -> list[Usage]:
    found = resources.measure()
    print("", Compiled(found).as_text(), sep="\n")
    return found


@pytest.mark.parametrize("arch", GATED)
def test_each_variant_of_each_kernel_compiles_and_does_not_spill(usages: list[Usage], arch: int) -> None:
    of_arch = [usage for usage in usages if usage.arch == arch]
    modules = [import_module(name) for name in resources.kernel_modules()]
    launched = {each.name for module in modules for each in module.variants() if each.since <= arch}
    assert {usage.variant for usage in of_arch} == launched
    assert [f"{usage.variant}: {what}" for usage in of_arch for what in usage.problems] == []
    assert all(0 < usage.registers <= 255 for usage in of_arch)


def test_a_variant_of_each_kernel_compiles_for_the_architecture_nobody_tested(usages: list[Usage]) -> None:
    assert [usage.problems for usage in usages if usage.arch == UNTESTED and usage.error] == []


def test_no_kernel_is_forgotten() -> None:
    """A kernel that no `variants()` lists would meet the compiler on a GPU only."""
    listed, defined, sources = set(), {}, []
    for module in map(import_module, resources.kernel_modules()):
        listed |= {variant.kernel.fn for variant in module.variants()}
    for file in sorted(Path(resources.__file__).parent.glob("*.py")):
        module = import_module(f"gammaray.kernels.fused.{file.stem}")
        own = [made.fn for made in vars(module).values() if isinstance(made, KernelInterface)]
        defined |= {fn.__name__: fn for fn in own if fn.__module__ == module.__name__}
    for name, fn in defined.items():
        sources.append(inspect.getsource(fn).replace(f"def {name}(", ""))
    helpers = {name for name in defined if any(re.search(rf"\b{name}\b", text) for text in sources)}
    assert {name for name, fn in defined.items() if fn not in listed} <= helpers
    assert listed


MODEL = {"stride", "vocab", "chunks", "S", "words", "qk_stride", "v_stride"}  # arguments that a model fixes


def test_no_size_of_a_step_is_compiled_in() -> None:
    """Catches: a kernel compiled anew, as requests wait, for a count that 16 divides, or that is 1."""
    script = """
from importlib import import_module
from gammaray.kernels.fused import resources
for name in resources.kernel_modules():
    for variant in import_module(name).variants():
        for parameter in variant.kernel.params:
            number = not variant.signature.get(parameter.name, "*").startswith("*")
            if number and not parameter.do_not_specialize:
                print(variant.kernel.fn.__name__, parameter.name, sep=".")
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    left = {tuple(line.split(".")) for line in found.stdout.split()}
    assert {argument for kernel, argument in left if argument not in MODEL} == {"slots"}
    assert {kernel for kernel, argument in left if argument == "slots"} == {"_move"}  # of the pool


def test_the_gate_finds_what_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: one that spills, one with too much shared memory, one that Triton refuses."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    seen: list[tuple[int, int]] = []
    found = resources.measure(["support.greedy_kernels"], progress=lambda *now: seen.append(now))
    assert seen == [(done, len(found)) for done in range(len(found) + 1)]
    on_h200 = {usage.variant: usage.problems for usage in found if usage.arch == 90}
    assert on_h200["fine"] == []
    assert [what.split()[0] for what in on_h200["spills"]] == ["spills"]
    assert [what.partition(" ")[2] for what in on_h200["shared"]] == [
        "bytes of shared memory, a block has 232448"
    ]
    assert "not_defined is not defined" in on_h200["broken"][0]
    assert "PROBLEM spills on sm_90" in Compiled(found).as_text()
    assert [usage.variant for usage in found if usage.arch == UNTESTED] == ["fine", "broken"]
