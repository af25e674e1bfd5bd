"""The stages of images/ without a builder: what their steps do, done below a folder instead of `/`.

Only a stage that writes to /opt and /src can be replayed. What one does to the system cannot be tried like
this: packages of Debian, users.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.dockerfile import Stage, Step

CHECKOUT = Path(__file__).resolve().parents[2]
OURS = re.compile(r"(?<![\w./-])/(?=(?:opt|src)\b)")


@dataclass(frozen=True)
class Root:
    """The folder that stands for `/`."""

    folder: Path

    def __call__(self, text: str) -> str:
        return OURS.sub(f"{self.folder}/", text)

    def replay(self, stage: Stage) -> None:
        """Raises AssertionError, with what it printed, for the first command that fails."""
        self._interpreter()
        for step in stage.steps:
            if step.word == "COPY":
                self._copy(step)
            elif step.word == "RUN":
                done = self.run(stage, step.rest, step)
                assert done.returncode == 0, f"{step.rest}\n{done.stdout}{done.stderr}"

    def run(self, stage: Stage, command: str, step: Step | None = None) -> subprocess.CompletedProcess[str]:
        """In the environment of the step, or of the whole stage."""
        folder = self.folder / (step or stage).folder.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        return subprocess.run(
            self(command),
            shell=True,
            cwd=folder,
            env=self._environment(step or stage),
            capture_output=True,
            text=True,
            timeout=900,
        )

    def _environment(self, of: Stage | Step) -> dict[str, str]:
        """This machine's settings of pip stay: they are what the secret `pip` would hold."""
        own = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_"))
        }
        path = f"{self.folder}/base:/usr/bin:/bin"
        own |= {"PATH": path, "PIP_NO_COMPILE": "1"}  # byte code would take another minute
        return own | {k: self(v).replace("$PATH", path) for k, v in of.environment.items()}

    def _interpreter(self) -> None:
        """The base image's Python."""
        python = self.folder / "base" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec "{sys._base_executable}" "$@"\n')  # type: ignore[attr-defined]
        python.chmod(0o755)

    def _copy(self, step: Step) -> None:
        *sources, target = step.arguments
        into = self.folder / step.folder.lstrip("/") / target
        into.mkdir(parents=True, exist_ok=True)
        for name in context() if sources == ["."] else sources:
            assert name in context(), f".dockerignore keeps {name} from the builder"
            source = CHECKOUT / name
            if source.is_dir():
                never = shutil.ignore_patterns(*ignored_everywhere())
                shutil.copytree(source, into / name, symlinks=True, ignore=never)
            else:
                shutil.copy(source, into / name)


def context() -> list[str]:
    """What of the checkout's top level goes to the builder."""
    return [line[1:] for line in _ignore_lines() if line.startswith("!")]


def ignored_everywhere() -> list[str]:
    return [line.removeprefix("**/") for line in _ignore_lines() if line.startswith("**/")]


def _ignore_lines() -> list[str]:
    """Raises AssertionError unless it lists what is allowed, so that what is added later stays outside."""
    lines = (CHECKOUT / ".dockerignore").read_text().split("\n")
    first, *rest = [line for line in lines if line and not line.startswith("#")]
    assert first == "*" and all(re.match(r"!\w|\*\*/", line) for line in rest), "ignore everything first"
    return rest
