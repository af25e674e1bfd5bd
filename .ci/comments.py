"""A griffe extension: what a comment behind a field says is the field's description.

Fields of gammaray's dataclasses and settings are explained at the end of their line, as in
`top_k: int = 0  # 0: off`, and not in strings of their own. This lets the API reference show them.
"""

from __future__ import annotations

import ast
import io
import tokenize
from functools import cache
from pathlib import Path
from typing import Any

from griffe import Attribute, Docstring, Extension


@cache
def comments(path: Path) -> dict[int, str]:
    """The comments of a file by their line."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return {each.start[0]: each.string.lstrip("# ") for each in tokens if each.type == tokenize.COMMENT}


class Comments(Extension):
    """Gives attributes without a docstring the last comment on the lines of their statement."""

    def on_attribute_instance(self, *, node: Any, attr: Attribute, **kwargs: Any) -> None:
        if attr.docstring or not isinstance(node, ast.stmt) or not isinstance(attr.filepath, Path):
            return
        known = comments(attr.filepath)
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        said = [known[line] for line in lines if line in known]
        if said and not said[-1].startswith(("noqa", "type:")):
            attr.docstring = Docstring(said[-1], parent=attr, lineno=node.lineno)
