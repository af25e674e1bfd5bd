"""Writes what follows from other files of the chart: `make chart`. With --check it says what is stale."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from keys import keys
from readme import readme
from schema import schema
from values import parse

HERE = Path(__file__).resolve().parent
CHART = HERE / "gammaray"
DASHBOARDS = HERE.parent / "telemetry" / "dashboards"
KEYS = HERE.parent / "cluster" / "chart_keys.json"


def outputs() -> dict[Path, str]:
    """Each file that is made, and what belongs into it. Raises ValueError for a value without a comment."""
    values = parse((CHART / "values.yaml").read_text())
    intro = (HERE / "README.intro.md").read_text()
    made = schema(values)
    known = {**(keys(made, made["definitions"]) or {}), "config": None}  # which has errors of its own
    return {
        CHART / "values.schema.json": json.dumps(made, indent=1) + "\n",
        KEYS: json.dumps(known, indent=1) + "\n",
        CHART / "README.md": readme(intro, values),
        **{_copy_of(file): file.read_text() for file in sorted(DASHBOARDS.iterdir())},
    }


def _copy_of(file: Path) -> Path:
    """A chart can only read what lies in it."""
    return CHART / "files" / ("dashboards" if file.suffix == ".json" else "") / file.name


def main(check: bool) -> int:
    """Exit code 1: something was stale and `check` was set."""
    stale = {file: text for file, text in outputs().items() if not file.exists() or file.read_text() != text}
    for file, text in stale.items():
        print(f"{file.relative_to(HERE.parent)} is {'stale: make chart' if check else 'written'}")
        if not check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
