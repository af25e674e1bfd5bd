"""What mkdocs needs to build the site from pages that are written to be read in the repository.

Pages outside of docs/ join the site, links between them are told anew, and of a link to a file that the site
does not have (code, a folder) the words stay. The API reference reads copies of the modules that it shows, in
which each room is a package of its own: griffe does not look into folders without an `__init__.py`.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Sections of the navigation that have whatever is in their folder.
LISTED = {"Decisions": "docs/decisions/*.md", "Measured": "benchmarks/results/*.md"}
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/results/*.md", "helm/*/README.md")
# Code stays as it is; else (label, target) of a link.
CODE_OR_LINK = re.compile(r"```.*?```|\[(`[^`\n]*`|[^\]\[]*)\]\(([^)\s]+)\)|`[^`\n]*`", re.DOTALL)


def on_startup(**_: Any) -> None:
    """Copies what the API reference shows. Any later, and mkdocstrings would not see the folder."""
    copy = ROOT / "build" / "reference"
    shutil.rmtree(copy, ignore_errors=True)
    text = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    for module in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE):
        file = copy / f"{module.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "src" / file.relative_to(copy), file)
    for folder in [path for path in copy.rglob("*") if path.is_dir()]:
        (folder / "__init__.py").touch()


def on_config(config: Any) -> None:
    """Lists in the navigation what is listed by its folder."""
    for title, pattern in LISTED.items():
        pages = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
        config.nav.append({title: [in_site(page) for page in pages]})


def on_files(files: Files, config: Any) -> None:
    """Adds the pages and figures outside of docs/ under their path in the repository."""
    for path in sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern)):
        uri = path.relative_to(ROOT).as_posix()
        file = File.generated(config, uri, abs_src_path=str(path))
        files.append(file)


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    return rewritten(markdown, page.file.src_uri, set(files.src_uris))


def rewritten(markdown: str, uri: str, known: set[str]) -> str:
    """`markdown` with the site's links: `uri` is the page's own there, `known` has those of all files."""

    def link(match: re.Match[str]) -> str:
        label, target = match.group(1), match.group(2)
        if target is None or re.match(r"[a-z]+:|#", target):
            return match.group()
        name, hash_, fragment = target.partition("#")
        there = in_site(in_repository(uri, name))
        if there in known:
            return f"[{label}]({os.path.relpath(there, PurePosixPath(uri).parent)}{hash_}{fragment})"
        return label if (ROOT / in_repository(uri, name)).exists() else match.group()

    return CODE_OR_LINK.sub(link, markdown)


def in_repository(uri: str, name: str) -> str:
    """Where a link to `name` on the page `uri` leads, as a path in the repository."""
    own = PurePosixPath(uri) if (ROOT / uri).is_file() else PurePosixPath("docs", uri)
    return os.path.normpath(own.parent / name)


def in_site(path: str) -> str:
    """docs/ is the site's root; other folders keep their names in it."""
    return path.removeprefix("docs/")
