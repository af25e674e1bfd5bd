"""What the documentation tells people to type, and what becomes of it in a test."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "helm").glob("*/*.md")])
EXCUSES = ("needs a cluster", "needs a GPU", "needs the network", "takes minutes")
PROGRAMS = "gammaray|make|curl|helm|kubectl|pip|docker|podman|git|python3?|cd|source|mkdocs|ray|npm|export"
TYPED = re.compile(rf"^(\$ )?([A-Z_]+=\S* )*(\.venv/bin/\S+|\.ci/run|({PROGRAMS})(?=\s))")
SHELLS = ("bash", "sh", "shell", "console")
FENCE = re.compile(
    r"(?:^ *<!-- not run: (?P<excuse>[^\n]*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
INDENTED = re.compile(r"\n\n {4}([^\n]*)")
INLINE = re.compile(r"`(gammaray [^`\n]+)`")
CALLS_SERVER = re.compile(r"127\.0\.0\.1|\$URL|\bcurl\b|gammaray (chat|top|tenants(?! replay))\b|\bclient\.")


@dataclass(frozen=True)
class Block:
    """A fenced block. `shown`: the unlabelled block right behind it, which is what it prints."""

    place: str  # page:line
    language: str
    text: str
    excuse: str | None = None
    shown: str | None = None

    @property
    def is_shell(self) -> bool:
        return self.language in SHELLS or (not self.language and bool(TYPED.match(self.text)))

    @property
    def is_typed(self) -> bool:
        return self.is_shell or self.language == "python"

    @property
    def needs_server(self) -> bool:
        return bool(CALLS_SERVER.search(self.text))

    def commands(self) -> str:
        """Without what they print, if that is in the block."""
        lines = self.text.splitlines()
        marked = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return "\n".join(marked or lines) + "\n"

    def printed(self) -> str | None:
        """What the commands are said to print."""
        if not self.text.startswith("$ "):
            return self.shown
        return "\n".join(line for line in self.text.splitlines() if not line.startswith("$ "))


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = list(FENCE.finditer(text))
    return [_block(page, text, *pair) for pair in zip_longest(found, found[1:])]


def _block(page: Path, text: str, match: re.Match[str], after: re.Match[str] | None) -> Block:
    line = text.count("\n", 0, match.start("indent")) + 1
    own = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
    follows = after is not None and not after["language"] and not text[match.end() : after.start()].strip()
    shown = after["text"] if after is not None and follows and not TYPED.match(after["text"]) else None
    return Block(f"{_name(page)}:{line}", match["language"], own, match["excuse"], shown)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def indented(page: Path) -> list[str]:
    """Commands in blocks that no fence encloses, which no test would run."""
    return [line for line in INDENTED.findall(FENCE.sub("", page.read_text())) if TYPED.match(line)]


def named(page: Path) -> list[str]:
    """Commands within sentences and tables, and those of blocks that are not run."""
    text = page.read_text()
    inside = [found.replace("\\|", "|") for found in INLINE.findall(FENCE.sub("", text))]
    excused = [block.commands() for block in blocks(page) if block.is_shell and block.excuse]
    lines = [line for block in excused for line in block.replace("\\\n", " ").splitlines()]
    return inside + [line for line in lines if line.startswith("gammaray ")]


def releases(page: Path) -> list[str]:
    """What `helm` is told to install or to upgrade to: the arguments behind that word."""
    typed = "".join(block.commands() for block in blocks(page) if block.is_shell).replace("\\\n", " ")
    return re.findall(r"^helm (?:install|upgrade(?: --install)?) ([^#\n]*)", typed, re.MULTILINE)


def unknown(line: str, command: Any) -> Iterator[str]:
    """Words of a line that `gammaray`, as click has it, would refuse."""
    for word in shlex.split(line, comments=True)[1:]:
        if word in ("|", ">", "&", ";", "&&", "||") or word.startswith("..."):
            return
        if word.startswith("--"):
            options = {name for own in command.params for name in (*own.opts, *own.secondary_opts)}
            if word.partition("=")[0] not in {*options, "--help"}:
                yield word
        elif subcommands := getattr(command, "commands", None):
            if word not in subcommands:
                yield word
                return
            command = subcommands[word]
