"""What drafters will take beside the target, read before they are loaded, against what they take."""

from __future__ import annotations

from typing import Any

import pytest
from support.registered import LAYERS, VOCAB, configuration

from gammaray.config import Config
from gammaray.engine import build, loading
from gammaray.engine.device import CPU
from gammaray.engine.pool import KVPool

HIDDEN = 32


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return configuration(tmp_path_factory.mktemp("drafters"))


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "dspark"])
def test_the_kv_of_heads_is_foreseen(settings: Config, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = settings.target
    runner = loading.load_runner(own.model, "float32", own.kv.block_size, own.kv.num_blocks)
    forms = [name for name, entry in settings.drafters.items() if entry.method == method]
    assert forms
    made, init = [], KVPool.__init__
    monkeypatch.setattr(KVPool, "__init__", lambda pool, *args: (made.append(pool), init(pool, *args))[1])
    for name in forms:
        build.build_drafter(name, settings, runner, loading.load_tokenizer(own.model))
        found = build._footprint(settings.drafters[name], settings, CPU)
        assert found.block == made[-1].nbytes // (made[-1].num_blocks + 1), name
        assert found.weights > 4 * HIDDEN**2, name
    assert len(made) == len(forms)


def test_what_takes_nothing_and_what_takes_a_head(settings: Config) -> None:
    found = {name: build._footprint(own, settings, CPU) for name, own in _alone(settings)}
    assert {found[name].weights for name in ("ngram", "suffix", "recycle", "lookahead", "layer_exit")} == {0}
    assert found["layer_exit-own-head"].weights == 4 * HIDDEN * VOCAB
    assert found["model-mamba"].block == 0 < found["model-mamba"].weights  # states are no KV
    # Its rows of the target's head are copied: it takes what one with such rows of its own takes, in 16 bits.
    assert found["eagle3-shared"].weights == found["eagle3"].weights // 2
    assert found["medusa"].block == 0 < found["medusa"].weights
    layer = 2 * 2 * 8 * 4 * settings.target.kv.block_size  # keys and values, heads, their size, bytes
    assert found["model"].block == layer < LAYERS * layer


def _alone(settings: Config) -> list[tuple[str, Any]]:
    return [(name, own) for name, own in settings.drafters.items() if own.method != "composite"]
