"""What the compiled kernels take of a GPU: registers, spilled bytes, shared memory. No GPU is needed.

Each module of this folder that has `variants()` says what of it is launched. Here all of that is compiled
down to machine code, and ptxas, which does the last step, reports. On a GPU a kernel that spills registers to
memory would be slow, and one that asks for more shared memory than a block can have would be refused.

Compiling needs a process in which Triton does not interpret; `measure` starts one.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gammaray.errors import GammarayError
from gammaray.kernels.fused.variant import Variant

HERE = Path(__file__).parent
SHARED_LIMIT = {
    80: 163 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
}  # bytes a block may ask for
GATED = (80, 90)  # compiled for every variant; above them, one variant a kernel
UNTESTED = 100
ALIGNMENT = [["tt.divisibility", 16]]  # of pointers: torch's allocator aligns to 256 bytes and more


@dataclass(frozen=True, slots=True)
class Usage:
    """What one variant takes on compute capability `arch` / 10; zeros where it did not compile."""

    variant: str
    arch: int
    warps: int
    registers: int  # a thread
    spill_stores: int  # bytes a thread
    spill_loads: int
    shared: int  # bytes a block
    seconds: float  # to compile
    error: str = ""

    @property
    def problems(self) -> list[str]:
        found = [self.error] if self.error else []
        if self.spill_stores or self.spill_loads:
            found.append(f"spills {self.spill_stores} bytes, reads back {self.spill_loads}")
        if self.shared > SHARED_LIMIT[self.arch]:
            found.append(f"{self.shared} bytes of shared memory, a block has {SHARED_LIMIT[self.arch]}")
        return found


@dataclass(frozen=True, slots=True)
class _Job:
    module: str
    index: int  # of the variant among the module's
    arch: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """What `gammaray bench kernels --compile` reports."""

    usages: Sequence[Usage]

    @property
    def failed(self) -> list[str]:
        return [f"{u.variant} on sm_{u.arch}: {what}" for u in self.usages for what in u.problems]

    def as_json(self) -> dict[str, object]:
        variants = [asdict(usage) | {"problems": usage.problems} for usage in self.usages]
        return {"triton": triton.__version__, "variants": variants}

    def as_text(self) -> str:
        """A table, and below it what is wrong."""
        width = max(len(usage.variant) for usage in self.usages)
        lines = [f"{'variant':<{width}}  arch    warps  regs  spill st/ld   shared KB     s"]
        lines += [f"{usage.variant:<{width}}  {_figures(usage)}" for usage in self.usages]
        lines += [f"PROBLEM {line}" for line in self.failed]
        untested = sum(usage.arch == UNTESTED for usage in self.usages)
        version = f"Triton {triton.__version__}"
        return "\n".join(
            [*lines, f"{version}; {untested} for sm_{UNTESTED}, which nobody tried; nothing was run"]
        )

    def as_markdown(self) -> str:
        return f"```\n{self.as_text()}\n```"


Progress = Callable[[int, int], None]  # compiled, of how many


def compiled(progress: Progress | None = None) -> Compiled:
    """All that this folder launches."""
    return Compiled(measure(progress=progress))


def measure(modules: Sequence[str] = (), processes: int = 2, progress: Progress | None = None) -> list[Usage]:
    """Compile what `modules` launch, all of this folder without any, in a process of their own.

    Raises GammarayError when that process fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __name__, str(processes), *modules]
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=said, text=True
        ) as child:
            assert child.stdout is not None
            lines, total = [], 0
            for line in child.stdout:  # the first is how many will follow
                lines.append(line)
                total = total or int(line)
                if progress:
                    progress(len(lines) - 1, total)
        if child.returncode:
            said.seek(0)
            raise GammarayError(f"compiling the kernels failed: {said.read().strip() or ''.join(lines)}")
    return [Usage(**json.loads(line)) for line in lines[1:]]


def _figures(u: Usage) -> str:
    spills = f"{u.spill_stores}/{u.spill_loads}"
    return f"sm_{u.arch:<4}{u.warps:>5}{u.registers:>6}{spills:>13}{u.shared / 1024:>12.1f}{u.seconds:>6.1f}"


def kernel_modules() -> list[str]:
    """Modules of this folder that launch kernels."""
    names = [f"gammaray.kernels.fused.{file.stem}" for file in sorted(HERE.glob("*.py"))]
    return [name for name in names if name != __name__ and hasattr(import_module(name), "variants")]


def compile_variant(variant: Variant, arch: int) -> Usage:
    """One variant for one compute capability, never from Triton's cache."""
    began = time.perf_counter()
    try:
        report, shared = _compile(variant, arch)
        found = _read(report)
        error = "" if found else f"no report of ptxas: {report.strip()!r}"
    except Exception as problem:  # Triton's, of any kind: the table says which variant it was
        found, shared, error = (), 0, f"{type(problem).__name__}: {' '.join(str(problem).split())[-400:]}"
    registers, stores, loads = found or (0, 0, 0)
    seconds = round(time.perf_counter() - began, 2)
    return Usage(variant.name, arch, variant.warps, registers, stores, loads, shared, seconds, error)


def _compile(variant: Variant, arch: int) -> tuple[str, int]:
    """What ptxas says, and the bytes of shared memory a block takes."""
    names = variant.kernel.arg_names
    pointers = [name for name, kind in variant.signature.items() if kind.startswith("*")]
    source = ASTSource(
        variant.kernel,
        signature={name: variant.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs={(names.index(name),): ALIGNMENT for name in pointers},
    )
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    options |= {"maxnreg": variant.registers} if variant.registers else {}
    log = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), redirect_stdout(log):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return log.getvalue(), made.metadata.shared


def _read(report: str) -> tuple[int, int, int] | tuple[()]:
    """(registers, spilled bytes stored, loaded) of a kernel and what it calls, as `ptxas -v` writes them."""
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", report)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    if not registers or not spills:
        return ()
    return max(registers), sum(int(stores) for stores, _ in spills), sum(int(loads) for _, loads in spills)


def _jobs(modules: Sequence[str]) -> Iterator[_Job]:
    for module in modules:
        kernels = []
        for index, variant in enumerate(import_module(module).variants()):
            first = variant.kernel not in kernels
            kernels.append(variant.kernel)
            archs = (*GATED, *([UNTESTED] if first else []))
            yield from (_Job(module, index, arch) for arch in archs if arch >= variant.since)


def _run(job: _Job) -> Usage:
    return compile_variant(list(import_module(job.module).variants())[job.index], job.arch)


def main(processes: int, modules: Sequence[str]) -> None:
    jobs = list(_jobs(modules or kernel_modules()))
    print(len(jobs), flush=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for usage in pool.map(_run, jobs):
            print(json.dumps(asdict(usage)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
