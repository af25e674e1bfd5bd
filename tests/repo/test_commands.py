"""What people are told to type works: each block is run, or says in a comment above it why not.

    <!-- not run: needs a cluster -->

Commands that would take long are cut short, and `gammaray serve` checks its configuration. Of `make` it is
the target that is checked: README's first command starts the server of this file, and CI runs the others.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from clients.server import Server, free_port, running
from support.embedded import needs_embedded
from support.helm import tool
from support.pages import (
    EXCUSES,
    PAGES,
    ROOT,
    TYPED,
    Block,
    blocks,
    indented,
    named,
    releases,
    unknown,
)
from support.typed import CONFIG, FILES, masked, typed

from gammaray.cli import app

EVERY = [block for page in PAGES for block in blocks(page)]
RUN = [block for block in EVERY if block.is_typed and block.excuse is None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("typed")
    for name, text in FILES.items():
        (where / name).write_text(text)
    (where / "helm").symlink_to(ROOT / "helm")
    return where


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """Started as README says, with an operator and another tenant."""
    where, port = folder, free_port()
    config = where / "server.yaml"
    config.write_text(f"{CONFIG}telemetry: {{prometheus_port: {free_port()}}}\n")
    make = ["make", "-n", "--no-print-directory", "-C", str(ROOT), "serve", f"ARGS={config} --port {port}"]
    line = subprocess.run(make, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    command = line if line.startswith(".venv/bin/gammaray serve ") else pytest.fail(line)
    here = [sys.executable, "-m", "gammaray.cli", *command.split()[1:]]
    with running(here, port, where / "server.log", threads=2) as started:
        yield started
    assert (started.code, started.orphans) == (0, [])


def case(block: Block) -> object:
    marks = [pytest.mark.ray, needs_embedded] if block.needs_server else []
    embedded = re.search(r"gammaray (generate|bench|validate)", block.text)
    return pytest.param(block, marks=[*marks, *([needs_embedded] if embedded else [])], id=block.place)


@pytest.mark.parametrize("block", [case(block) for block in RUN])
def test_what_people_are_told_to_type_works(
    block: Block, folder: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("server").url if block.needs_server else "http://127.0.0.1:8000"
    printed = typed(block, folder, url)
    if (expected := block.printed()) is not None and "make " not in block.text:
        assert masked(printed) == masked(expected)


@pytest.mark.ray
@needs_embedded
def test_the_server_says_at_its_start_what_the_readme_shows(server: Server, folder: Path) -> None:
    (shown,) = [block.shown for block in RUN if block.commands() == "make serve\n" and block.shown]
    said = [line.split()[0] for line in (folder / "server.log").read_text().splitlines() if line]
    assert [line.split()[0] for line in shown.splitlines()] == [word for word in said if word != "warning:"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_escapes(page: Path) -> None:
    """Every command is in a block that is run, or that says by a known reason why it is not."""
    assert escaped(page) == []


@pytest.mark.parametrize("release", sorted({own for page in PAGES for own in releases(page)}))
def test_what_helm_is_told_to_install_can_be_rendered(release: str, folder: Path) -> None:
    """As far as it goes without a cluster."""
    command = [tool("helm", "4"), "template", *shlex.split(release)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def escaped(page: Path) -> list[str]:
    known = re.compile("|".join(EXCUSES))
    unfounded = [own.place for own in blocks(page) if own.excuse is not None and not known.match(own.excuse)]
    unseen = [
        line
        for own in blocks(page)
        if not own.is_typed
        for line in own.text.splitlines()
        if TYPED.match(line)
    ]
    wrong = [line for line in named(page) for _ in unknown(line, typer.main.get_command(app))]
    return unfounded + unseen + wrong + indented(page)


def test_a_command_that_escapes_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Say `gammaray serve CONFIG --prot 1`, `gammaray plna`, or `gammaray tenants set T x=1 --json`.\n\n"
        "    gammaray key\n\n"
        "```text\nfirst\ngammaray chat\n```\n\n"
        "<!-- not run: no time -->\n```\nmake test\n```\n\n"
        "<!-- not run: needs a cluster -->\n```bash\nkubectl get pods\ngammaray top --onec\n```\n"
    )
    assert escaped(page) == [
        "page.md:11",
        "gammaray chat",
        "gammaray serve CONFIG --prot 1",
        "gammaray plna",
        "gammaray top --onec",
        "gammaray key",
    ]


def test_a_command_that_fails_or_prints_something_else_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```\ngammaray plan none.yaml\n```\n\n```\n$ gammaray --version\ngammaray 1 of 2\n```\n")
    wrong, other = blocks(page)
    with pytest.raises(AssertionError, match=r"none\.yaml"):
        typed(wrong, tmp_path, "")
    expected = other.printed()
    assert expected is not None and masked(typed(other, tmp_path, "")) != masked(expected)
