"""The configuration file: what it may say, and what is said about what it may not."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.config import dump, load, parse
from gammaray.errors import ConfigError
from gammaray.types import MAX_TREE_NODES
from gammaray.yamlfile import read

FULL = """\
target:
  model: some/model
  dtype: float32
  max_model_len: 1024
  kv: {block_size: 8, memory: 0.5, prefix_cache: false, num_blocks: 100}
  max_batch: 4
  token_budget: 64
drafters:
  lookup: {method: ngram, max_ngram: 3, min_ngram: 1}
  small: {method: model, model: other/model, dtype: bfloat16, draft_sampling: true}
tenants:
  chat:
    drafter: small
    speculation: {gamma: 16, tree_width: 4, enabled: false, verification: rejection}
server: {host: 0.0.0.0, port: 9000}
"""


def config(text: str):
    return parse(read(text, "test"), "test")


def test_default_serves_the_embedded_model_with_lookup() -> None:
    default = load()
    assert default.target.model == "smollm2-135m-instruct"
    assert default.drafters["lookup"].method == "ngram"
    assert default.tenants["default"].drafter == "lookup"
    assert (default.server.host, default.server.port) == ("127.0.0.1", 8000)


@pytest.mark.parametrize("text", [FULL, "target: {model: x}"])
def test_dump_loads_to_the_same(text: str, tmp_path: Path) -> None:
    given = config(text)
    file = tmp_path / "c.yaml"
    file.write_text(dump(given))
    assert load(file) == given
    assert pickle.loads(pickle.dumps(given)) == given
    assert load() == config(dump(load()))


def test_a_tenant_named_default_is_always_there() -> None:
    assert set(config(FULL).tenants) == {"default", "chat"}
    assert config("target: {model: x}").tenants["default"].drafter is None


def test_it_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().target.model = "other"  # type: ignore[misc]


MODEL = "target: {model: x}\n"


def drafter(inner: str) -> str:
    return MODEL + f"drafters: {{d: {{{inner}}}}}"


def tenant(inner: str) -> str:
    return MODEL + f"tenants: {{a: {{{inner}}}}}\ndrafters: {{lookup: {{method: ngram}}}}"


def speculation(inner: str) -> str:
    return tenant(f"speculation: {{{inner}}}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (tenant("speculatoin: {}"), "tenants.a.speculatoin: unknown key; did you mean 'speculation'?"),
        ("target: {modle: x}", "target.modle: unknown key; did you mean 'model'?"),
        (MODEL + "zzz: 1", "zzz: unknown key; known here: drafters, server, target, tenants"),
        (
            drafter("method: ngram, max_ngrm: 3"),
            "drafters.d.max_ngrm: unknown key; did you mean 'max_ngram'?",
        ),
        ("target: {model: x, tensor_parallel: 2}", "target.tensor_parallel: not supported yet"),
        (tenant("buckets: []"), "tenants.a.buckets: not supported yet"),
        (speculation("adaptive: true"), "tenants.a.speculation.adaptive: not supported yet"),
        (MODEL + "controller: {}", "controller: not supported yet"),
        (drafter("method: eagle3, path: x"), "drafters.d: method 'eagle3' is not supported yet"),
        (drafter("method: magic"), "unknown or missing method 'magic'; use ngram or model"),
        (drafter("max_ngram: 3"), "unknown or missing method None"),
        (drafter("method: ngram, max_ngram: 2, min_ngram: 3"), "drafters.d: min_ngram must not exceed"),
        (tenant("drafter: lokup"), "tenants.a.drafter: no drafter is named 'lokup'; did you mean 'lookup'?"),
        (MODEL + "tenants: {a: {drafter: d}}", "known here: none"),
        (speculation("gamma: 17"), "tenants.a.speculation.gamma: Input should be less than or equal to 16"),
        (speculation("gamma: 0"), "greater than or equal to 1 (got 0)"),
        (speculation("tree_width: 9"), "less than or equal to 8"),
        (speculation("gamma: 16, tree_width: 5"), "at most 64 (got 16 * 5)"),
        ("target: {model: x, dtype: int4}", "target.dtype: Input should be 'auto', 'float32', 'bfloat16'"),
        ("target: {model: x, kv: {memory: 1.5}}", "target.kv.memory"),
        ("target: {model: x, kv: {memory: .nan}}", "target.kv.memory"),
        (MODEL + "server: {port: '80'}", "server.port: Input should be a valid integer (got '80')"),
        (MODEL + "server: {port: true}", "server.port"),
        ("target: {model: 3}", "target.model: Input should be a valid string (got 3)"),
        ("target: {}", "target.model: Field required"),
        ("", "expected a mapping"),
        ("- a", "expected a mapping"),
        (MODEL + "tenants: []", "tenants: Input should be a valid"),
        (MODEL + "target: {model: y}", "line 2: key 'target' appears twice"),
        ("target:\n  model: x\n  kv: {memory: 0.1, memory: 0.2}", "line 3: key 'memory' appears twice"),
        ("target: [", "line 1"),
        ("target: {model: 2020-13-45}", "not YAML"),
        ("target: !!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_faults_are_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as fault:
        config(text)
    assert says in str(fault.value)
    assert str(fault.value).startswith("test:")


def test_every_fault_has_its_line() -> None:
    with pytest.raises(ConfigError) as fault:
        config("target: {model: x, max_batch: 0}\nserver: {port: 0}")
    assert len(str(fault.value).splitlines()) == 2


def test_merge_keys_may_be_overridden() -> None:
    text = "base: &b {model: x}\ntarget: {<<: *b, model: y}"
    assert read(text, "test") == {"base": {"model": "x"}, "target": {"model": "y"}}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="directory"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"\xe9")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(tmp_path / "latin.yaml")


def test_with_server() -> None:
    assert load().with_server(None, None) == load()
    moved = load().with_server("::1", 9)
    assert (moved.server.host, moved.server.port) == ("::1", 9)
    with pytest.raises(ConfigError, match=r"command line: server\.port"):
        load().with_server(None, 70000)


@given(st.text(max_size=200))
def test_any_text_is_a_configuration_or_a_config_error(text: str) -> None:
    try:
        config(text)
    except ConfigError as error:
        assert str(error)


@given(st.integers(-2, 20), st.integers(-2, 10))
def test_drafts_fit_into_the_node_limit(gamma: int, width: int) -> None:
    text = speculation(f"gamma: {gamma}, tree_width: {width}")
    fits = 1 <= gamma <= 16 and 1 <= width <= 8 and gamma * width <= MAX_TREE_NODES
    if fits:
        assert config(text).tenants["a"].speculation.gamma == gamma
    else:
        with pytest.raises(ConfigError):
            config(text)
