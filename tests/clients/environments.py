"""Environments of the clients below `.clients/`: made once, and again when their pins change."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORK = HERE.parents[1] / ".clients"


def python_with(requirements: str) -> Path:
    """The interpreter of an environment with exactly the pins of `requirements`, a file of this folder."""
    pins = HERE / requirements
    folder = WORK / pins.stem
    python = folder / "bin" / "python"
    if _changed(pins, folder):
        print(f"installing {requirements} ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _quietly([sys.executable, "-m", "venv", folder])
        _quietly([python, "-m", "pip", "install", "--quiet", "--no-compile", "-r", pins])
        _remember(pins, folder)
    return python


def node_with(package: str, *scripts: str) -> Path:
    """A folder with the packages of `package` and copies of `scripts`, which find packages beside them."""
    pins = HERE / package
    folder = WORK / "node"
    if _changed(pins, folder):
        print(f"installing {package} ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(pins, folder / "package.json")
        _quietly(["npm", "install", "--no-package-lock", "--no-audit", "--no-fund"], folder)
        _remember(pins, folder)
    for script in scripts:
        shutil.copy(HERE / script, folder)
    return folder


def plain_environment() -> dict[str, str]:
    """The caller's variables, less those that would reach into another interpreter."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def _changed(pins: Path, folder: Path) -> bool:
    stamp = folder / ".pins"
    return not stamp.exists() or stamp.read_text() != pins.read_text()


def _remember(pins: Path, folder: Path) -> None:
    (folder / ".pins").write_text(pins.read_text())


def _quietly(command: list[str | Path], folder: Path | None = None) -> None:
    """Raises CalledProcessError, after the command's output."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=plain_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout)
    done.check_returncode()
