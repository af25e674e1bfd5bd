"""Which weights a target has: what a drafter that was made for it is tied to.

A head continues hidden states of one set of weights. For another set (a fine-tune, another quantisation) it
stays lossless, but what was measured of it is void.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

from huggingface_hub import snapshot_download

from gammaray import packaged
from gammaray.engine import gguf, loading
from gammaray.errors import ConfigError

FORMS = ("model.safetensors", "pytorch_model.bin")  # of a checkpoint, the one that transformers reads first


def of(model: str) -> str:
    """SHA-256 of the weights of what `loading.load_runner` accepts as a name: of a single file its own, of
    several that of what `sha256sum` says of them, sorted by name. A GGUF counts as it is, not as converted.

    It is read once and remembered with the file's size and time. Raises ConfigError when there are none.
    """
    files = weight_files(model)
    if len(files) == 1:
        return _digest(files[0])
    listing = "".join(f"{_digest(file)}  {file.name}\n" for file in files)
    return hashlib.sha256(listing.encode()).hexdigest()


def weight_files(model: str) -> list[Path]:
    """Sorted by name. Raises ConfigError when there are none."""
    if model in packaged.MODELS:
        return [packaged.gguf(model)]
    place = Path(model).expanduser()
    if place.suffix == ".gguf" and place.is_file():
        return [place]
    place = Path(loading.resolve(model))
    folder = place if place.is_dir() else _downloaded(model)
    for name in FORMS:
        if files := _files(folder, name):
            return files
    raise ConfigError(f"{model!r} holds no weights ({', '.join(FORMS)}), so nothing can be made for them")


def _files(folder: Path, name: str) -> list[Path]:
    """The one file of that name, or the shards of its index."""
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return [folder / name] if (folder / name).is_file() else []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} does not say which files hold the weights: load them anew") from error
    return [folder / one for one in sorted(names)]


def _downloaded(model: str) -> Path:
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the weights of {model!r} are not on this machine: load it once before") from error


def _digest(file: Path) -> str:
    """From memory where size and time are as they were: a large checkpoint takes minutes to read."""
    try:
        state = file.stat()
        note = _notes() / hashlib.sha256(str(file.resolve()).encode()).hexdigest()
        known = [state.st_size, state.st_mtime_ns]
        if (found := _noted(note)) and found[:2] == known:
            return str(found[2])
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    _note(note, [*known, digest])
    return digest


def _noted(note: Path) -> list[object] | None:
    """Size, time and digest as noted; None: not noted, or not in a way that can be used."""
    try:
        found = json.loads(note.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, list) and len(found) == 3 else None


def _note(note: Path, found: list[object]) -> None:
    """At once or not at all; a cache that cannot be written only costs time."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False) as work:
            json.dump(found, work)
        os.replace(work.name, note)
    except OSError:
        return


def _notes() -> Path:
    return gguf.cache_root() / "identities"
