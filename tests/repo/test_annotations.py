"""Functions beside Triton kernels are annotated.

mypy cannot ask for it there: it would ask for the kernels' arguments as well, whose types Triton knows.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FUSED = Path(__file__).resolve().parents[2] / "kernels" / "fused"


def unannotated(source: str) -> list[str]:
    """Functions without Triton's decorator that lack an annotation."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and not any("jit" in ast.dump(d) for d in node.decorator_list):
            own = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            missing = [arg.arg for arg in own if arg.annotation is None and arg.arg not in ("self", "cls")]
            found += [node.name] if missing or node.returns is None else []
    return found


@pytest.mark.parametrize("file", sorted(FUSED.glob("*.py")), ids=lambda file: file.stem)
def test_what_is_no_kernel_is_annotated(file: Path) -> None:
    assert unannotated(file.read_text()) == []


def test_a_missing_annotation_is_found() -> None:
    source = "@triton.jit\ndef kernel(x): ...\ndef good(x: int) -> int: ...\n"
    assert unannotated(source + "def bad(x) -> int: ...\ndef worse(x: int): ...\n") == ["bad", "worse"]
