"""Check what a built wheel holds, then import from it: `check_wheel.py gammaray-*.whl`.

The rooms are symlinks in src/gammaray, and build tools lose linked files without an error, so the
wheel is compared with the checkout file by file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "gammaray"
PROBE = "import gammaray.types as t, os; print(os.path.realpath(t.__file__))"


def expected() -> set[str]:
    """Every module under src/gammaray, the linked rooms included, by its name in the wheel."""
    entries = list(PACKAGE.iterdir())
    files = [entry for entry in entries if entry.suffix == ".py"]
    files += [file for room in entries if room.is_dir() for file in room.rglob("*.py")]
    return _named(files)


def heads() -> set[str]:
    """Every file of the draft heads that come with gammaray, likewise."""
    return _named([file for file in (PACKAGE / "heads").rglob("*") if file.is_file()])


def _named(files: list[Path]) -> set[str]:
    return {f"gammaray/{file.relative_to(PACKAGE).as_posix()}" for file in files}


def problems(names: set[str]) -> list[str]:
    """What is wrong with a wheel that holds `names`."""
    modules = {name for name in names if name.endswith(".py")}
    found = [f"missing: {name}" for name in sorted(expected() - modules)]
    found += [f"missing, see package-data: {name}" for name in sorted(heads() - names)]
    found += [f"does not belong: {name}" for name in sorted(modules - expected())]
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        found.append("missing: LICENSE")
    return found


def import_from(wheel: Path) -> str | None:
    """None when gammaray.types comes out of the installed wheel, else what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        install = [
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            folder,
            str(wheel),
        ]
        subprocess.run([sys.executable, *install], check=True)
        probe = subprocess.run(
            [sys.executable, "-c", PROBE],
            cwd=folder,
            env={"PYTHONPATH": folder},
            capture_output=True,
            text=True,
        )
        origin = Path(probe.stdout.strip() or "nowhere")
        inside = origin.is_relative_to(Path(folder).resolve())
        return None if inside else f"imported from {origin}\n{probe.stderr}"


def main(wheel: Path) -> int:
    names = set(zipfile.ZipFile(wheel).namelist())
    found = problems(names) or [problem for problem in [import_from(wheel)] if problem]
    for problem in found:
        print(f"{wheel.name}: {problem}", file=sys.stderr)
    if not found:
        print(f"{wheel.name}: {len(expected())} modules, {len(heads())} files of heads, LICENSE, importable")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
