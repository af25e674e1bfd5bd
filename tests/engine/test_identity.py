"""Which weights a drafter is tied to."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from support.checkpoint import save_checkpoint
from support.embedded import needs_embedded

from gammaray import packaged
from gammaray.engine import identity
from gammaray.errors import ConfigError


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is remembered yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_it_is_of_the_weights_and_of_nothing_else(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model")
    assert identity.of(model) == sha256(tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "notes.safetensors").write_bytes(b"a head that lies beside it")
    assert identity.of(model) == sha256(tmp_path / "model" / "model.safetensors")
    assert identity.of(save_checkpoint(tmp_path / "other", seed=1)) != identity.of(model)


def test_shards_count_together_and_each_of_them(tmp_path: Path) -> None:
    shards = [tmp_path / f"model-{i}.safetensors" for i in range(2)]
    for shard in shards:
        shard.write_bytes(shard.name.encode())
    index = {"weight_map": {"a": shards[1].name, "b": shards[0].name, "c": shards[1].name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    listing = "".join(f"{sha256(shard)}  {shard.name}\n" for shard in shards)
    assert identity.of(str(tmp_path)) == hashlib.sha256(listing.encode()).hexdigest()


def test_a_file_that_changed_is_read_again_and_one_that_did_not_is_not(tmp_path: Path) -> None:
    """A head for weights that were overwritten in place must not pass as theirs."""
    model = save_checkpoint(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    before, state = identity.of(model), file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert identity.of(model) == before, "with size and time as they were it is remembered"
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert identity.of(model) == sha256(file) != before


def test_a_note_that_was_cut_short_is_no_identity(tmp_path: Path, cache: Path) -> None:
    model = save_checkpoint(tmp_path / "model")
    found = identity.of(model)
    (note,) = [file for file in cache.rglob("identities/*") if file.is_file()]
    note.write_text(note.read_text()[:-3])
    assert identity.of(model) == found


@needs_embedded
def test_a_gguf_counts_as_it_is() -> None:
    """Not as what it is converted to: that depends on the version of transformers."""
    assert identity.of("smollm2-135m-instruct") == sha256(packaged.gguf("smollm2-135m-instruct"))


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no weights"):
        identity.of(str(tmp_path))


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_index_that_is_damaged_is_said_to_be(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match="does not say which files"):
        identity.weight_files(str(tmp_path))
