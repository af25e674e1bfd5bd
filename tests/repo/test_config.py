"""The configuration file: what it may say, and what is said about what it may not."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import gammaray.config
from gammaray.config import Config, Target, dump, load, parse
from gammaray.drafter_config import FOREIGN
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
  max_waiting: 9
  asynchronous: true
drafters:
  lookup: {method: ngram, max_ngram: 3, min_ngram: 1}
  small: {method: model, model: other/model, dtype: bfloat16, draft_sampling: true}
tenants:
  chat:
    drafter: small
    speculation: {gamma: 16, tree_width: 4, enabled: false, verification: rejection}
    api_keys: [{name: web, sha256: 5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8}]
    limits: {requests_per_minute: 600, max_concurrent: 256, tokens_per_day: null, max_tokens: 4096}
telemetry: {otlp_endpoint: null, log_prompts: true}
server:
  host: 0.0.0.0
  port: 9000
  require_api_key: true
  operator_keys: [{name: ops, sha256: 04f8996da763b7a969b1028ee3007569eaf3a635486ddab211d512c85b9df8fb}]
  protect_metrics: true
  max_body_bytes: 1000
  request_timeout_s: 1.5
  access_log: access.jsonl
"""
HASH = "ab" * 32
KEY = f"{{name: web, sha256: {HASH}}}"


def config(text: str):
    return parse(read(text, "test"), "test")


@pytest.mark.parametrize("head", [None, "heads/smollm2-135m-instruct"])
def test_default_serves_the_embedded_model(monkeypatch: pytest.MonkeyPatch, head: str | None) -> None:
    """With lookup, and with the head beside it where one fits; a head that does not would stop the start."""
    monkeypatch.setattr(gammaray.config, "fitting_head", lambda alias: head)
    default = load()
    assert default.target.model == "smollm2-135m-instruct"
    assert default.drafters["lookup"].method == "ngram"
    used = default.drafters[default.tenants["default"].drafter or ""]
    assert [part.method for part in default.parts(used)] == (["ngram", "eagle3"] if head else ["ngram"])
    assert [getattr(part, "path", None) for part in default.parts(used)][1:] == ([head] if head else [])
    assert default.tenants["default"].warmup_s in (None, 0)  # else it would adapt nothing for half an hour
    assert (default.server.host, default.server.port) == ("127.0.0.1", 8000)
    assert default == config(dump(default))


@pytest.mark.parametrize("text", [FULL, "target: {model: x}"])
def test_dump_loads_to_the_same(text: str, tmp_path: Path) -> None:
    given = config(text)
    file = tmp_path / "c.yaml"
    file.write_text(dump(given))
    assert load(file) == given
    assert pickle.loads(pickle.dumps(given)) == given


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


def keys(inner: str) -> str:
    return tenant(f"api_keys: [{inner}]")


def server(inner: str) -> str:
    return MODEL + f"server: {{{inner}}}"


WHEN = "when: {prompt_tokens_over: 9}"


def speculation(inner: str) -> str:
    return tenant(f"speculation: {{{inner}}}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (tenant("speculatoin: {}"), "tenants.a.speculatoin: unknown key; did you mean 'speculation'?"),
        ("target: {modle: x}", "target.modle: unknown key; did you mean 'model'?"),
        (
            MODEL + "zzz: 1",
            "zzz: unknown key; known here: controller, drafters, placement, server, target, telemetry, "
            "tenants",
        ),
        (
            drafter("method: ngram, max_ngrm: 3"),
            "drafters.d.max_ngrm: unknown key; did you mean 'max_ngram'?",
        ),
        ("target: {model: x, tensor_parallel: 9}", "target.tensor_parallel"),
        (
            "target: {model: x, tensor_parallel: 2, deterministic: true}",
            "target: deterministic does not work with tensor_parallel",
        ),
        (
            "target: {model: x}\ntenants: {t: {pool: {workers: 3, max_workers: 2}}}",
            "tenants.t.pool: max_workers must not be below workers",
        ),
        (tenant("buckets: [{alpha: [0, 0.5], gamma: 2}]"), "tenants.a.buckets: must cover alpha from 0 to 1"),
        (
            tenant("buckets: [{alpha: [0, 0.6], gamma: 2}, {alpha: [0.5, 1], gamma: 4}]"),
            "tenants.a.buckets: must cover alpha from 0 to 1 without gap or overlap",
        ),
        (tenant("buckets: [{alpha: [0.5, 0.5], gamma: 2}]"), "buckets[0]: alpha must be [low, high]"),
        (tenant("buckets: [{alpha: [0, 1], gamma: 16, width: 5}]"), "at most 64 (got 16 * 5)"),
        (tenant("classes: [{name: Long}]"), "tenants.a.classes[0].name: String should match"),
        (tenant(f"classes: [{{name: warmup, {WHEN}}}]"), "one of the server's own, is named 'warmup'"),
        (tenant(f"classes: [{{name: a, {WHEN}}}, {{name: a, {WHEN}}}]"), "is named 'a'"),
        (tenant("classes: [{name: a, when: {promt_tokens_over: 1}}]"), "did you mean 'prompt_tokens_over'?"),
        (
            tenant(f"classes: [{{name: a, {WHEN}, drafter: lokup}}]"),
            "tenants.a.classes[0].drafter: no drafter is named",
        ),
        (tenant("fallback_drafter: x"), "tenants.a.fallback_drafter: no drafter is named 'x'"),
        (tenant("choices: [{drafter: x}]"), "tenants.a.choices[0].drafter: no drafter is named 'x'"),
        (speculation("canary: {drafter: x}"), "a.speculation.canary.drafter: no drafter is named 'x'"),
        (
            tenant("drafter: lookup, speculation: {canary: {drafter: lookup}}"),
            "is the tenant's drafter already",
        ),
        (MODEL + "telemetry: {prometheus_port: 8000}", "prometheus_port: server.port has 8000 already"),
        (speculation("enabled_ratio: 1.5"), "enabled_ratio: Input should be less than or equal to 1"),
        (MODEL + "controller: {interval_s: 0}", "controller.interval_s: Input should be greater than"),
        (
            MODEL + "telemetry: {otlp_endpoint: 'localhost:4317'}",
            "telemetry.otlp_endpoint: String should match",
        ),
        (
            MODEL + "telemetry: {trace_ratio: 0.1}",
            "telemetry.trace_ratio: there is no telemetry.otlp_endpoint",
        ),
        (tenant("limits: {max_concurrent: 0}"), "greater than or equal to 1 (got 0)"),
        (MODEL + "telemetry: {prometheus_port: 70000}", "telemetry.prometheus_port: Input should be less"),
        (MODEL + "telemetry: {log_prompts: true}", "telemetry.log_prompts: there is no server.access_log"),
        (server("require_api_key: true"), "server.require_api_key: no tenant has api_keys"),
        (server("protect_metrics: true"), "server.protect_metrics: there are no server.operator_keys"),
        (server("request_timeout_s: .inf"), "server.request_timeout_s"),
        (server("max_body_bytes: 0"), "server.max_body_bytes"),
        (keys("{name: web, sha256: abc}"), "tenants.a.api_keys[0].sha256: must be the SHA-256 of a key"),
        (keys("{name: web}"), "tenants.a.api_keys[0].sha256: Field required"),
        (keys(f"{{name: 'a b', sha256: {HASH}}}"), "tenants.a.api_keys[0].name: String should match"),
        (keys(f"{KEY}, {KEY.replace('ab', 'cd')}"), "tenants.a.api_keys: two keys are named 'web'"),
        (drafter("method: eagle3"), "drafters.d.path: Field required"),
        (drafter("method: eagle3, model: x"), "drafters.d.model: unknown key; did you mean 'path'?"),
        (drafter("method: suffix, model: x"), "drafters.d.model: unknown key; did you mean 'method'?"),
        (
            drafter("method: mtp, num_speculative_tokens: 4"),
            "drafters.d.num_speculative_tokens: unknown key; did you mean 'tenants.NAME.speculation.gamma'?",
        ),
        ("target: {model: x, max_num_seqs: 4}", "max_num_seqs: unknown key; did you mean 'max_batch'?"),
        (drafter("method: magic"), "unknown or missing method 'magic'; use ngram, suffix, "),
        (drafter("method: mtp, draft_sampling: true, tree: dynamic"), "drafters.d: draft_sampling needs"),
        (drafter("method: composite, drafters: [d, d]"), "drafters.d: drafters: each only once"),
        (drafter("method: composite, drafters: [d, x]"), "drafters.d.drafters: 'd' is a composite itself"),
        (
            MODEL + "drafters: {d: {method: composite, drafters: [one, two]}, one: {method: ngram}}",
            "drafters.d.drafters: 'two' is not the name of a drafter",
        ),
        (
            MODEL + "drafters: {d: {method: composite, drafters: [a, b]}, a: {method: ngram}, "
            "b: {method: model, model: x, draft_sampling: true}}",
            "drafters.d.drafters: 'b' draws its tokens",
        ),
        (drafter("max_ngram: 3"), "unknown or missing method None"),
        (drafter("method: [ngram]"), "unknown or missing method list"),
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


PLACES = [place for place in [*FOREIGN.values(), *Target.foreign.values()] if "." in place]


@pytest.mark.parametrize("place", PLACES)
def test_where_foreign_keys_are_said_to_be_there_is_a_key(place: str) -> None:
    """One that was renamed would be recommended for ever."""
    tree = yaml.safe_load(dump(load()))
    for part in place.replace("NAME", "default").split("."):
        assert part in tree
        tree = tree[part]


def test_every_fault_has_its_line() -> None:
    with pytest.raises(ConfigError) as fault:
        config("target: {model: x, max_batch: 0}\nserver: {port: 0}")
    assert len(str(fault.value).splitlines()) == 2


@pytest.mark.parametrize("case", [str.lower, str.upper])
def test_a_key_belongs_to_one_place(case) -> None:
    again = f"{{name: other, sha256: {case(HASH)}}}"
    for text, places in (
        (keys(f"{KEY}, {again}"), ("tenants.a.api_keys[1]", "tenants.a.api_keys[0]")),
        (
            MODEL + f"tenants: {{a: {{api_keys: [{KEY}]}}, b: {{api_keys: [{again}]}}}}",
            ("tenants.b.api_keys[0]", "tenants.a.api_keys[0]"),
        ),
        (
            keys(KEY) + f"\nserver: {{operator_keys: [{again}]}}",
            ("server.operator_keys[0]", "tenants.a.api_keys[0]"),
        ),
    ):
        with pytest.raises(ConfigError) as fault:
            config(text)
        assert str(fault.value) == f"test: {places[0]}: the same key as {places[1]}"


@pytest.mark.parametrize(
    "inner",
    [
        "api_keys: [SECRET]",
        "api_keys: SECRET",
        "api_keys: {web: SECRET}",
        "api_keys: [{name: web, sha256: SECRET}]",
        "api_keys: [{name: web, key: SECRET}]",
        "api_keys: [{name: SECRET!, sha256: x}]",
        "api_keys: [{SECRET: web}]",
        "api_keys: [[SECRET]]",
    ],
)
def test_a_key_in_the_wrong_place_is_not_shown(inner: str) -> None:
    for text in (tenant(inner), server(inner.replace("api_keys", "operator_keys"))):
        with pytest.raises(ConfigError) as fault:
            config(text.replace("SECRET", "gr-0123"))
        assert "_keys" in str(fault.value)
        assert "gr-0123" not in str(fault.value)


def test_tenants_without_a_key_are_unreachable() -> None:
    text = MODEL + f"tenants: {{a: {{}}, b: {{api_keys: [{KEY}]}}, default: {{}}}}"
    assert config(text).unreachable_tenants() == ["a"]


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


def fields(model: type) -> set[str]:
    """The keys of a section and of those inside it."""
    inner = [field.annotation for field in model.model_fields.values()]
    names = set(model.model_fields) | set(model.planned)
    return names.union(*(fields(section) for section in inner if hasattr(section, "model_fields")))


WORDS = [*sorted(fields(Config)), "method", "max_ngram", "sha256", "name", "gamma", "api_keys", "limits", "a"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["x" * 10_000, "\ud800", "ngram", "model", HASH])
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.dates()
)
NAMES = st.sampled_from(WORDS) | SCALARS
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
SECTIONS = st.dictionaries(
    st.sampled_from(["target", "drafters", "tenants", "telemetry", "server"]),
    TREES | st.dictionaries(st.sampled_from(WORDS), TREES, max_size=4),
)


def check(read_it) -> None:
    """What is read is a configuration, or a ConfigError that can be printed and is not endless."""
    try:
        found = read_it()
    except ConfigError as error:
        assert 0 < len(str(error).encode("utf-8", "backslashreplace")) < 20_000
    else:
        assert isinstance(found, Config)


@settings(max_examples=300, deadline=None)
@given(TREES | SECTIONS | SECTIONS.map(lambda tree: {"target": {"model": "x"}} | tree))
def test_any_tree_is_a_configuration_or_a_config_error(tree: object) -> None:
    check(lambda: parse(tree, "test"))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("key", ["max_batch", "model", "kv", "other"])
def test_numbers_that_python_does_not_print(key: str, sign: int) -> None:
    check(lambda: parse({"target": {"model": "x", key: sign * 10**5000}}, "test"))


@settings(max_examples=300, deadline=None)
@given(SECTIONS.map(lambda tree: {"target": {"model": "x"}} | tree), st.data())
def test_any_yaml_is_a_configuration_or_a_config_error(tree: dict, data: st.DataObject) -> None:
    """Trees as YAML, with a few characters changed."""
    try:
        text = yaml.safe_dump(tree)
    except (ValueError, yaml.YAMLError):  # an integer of 5,000 digits, or half a surrogate pair
        return
    at, new = data.draw(st.integers(0, len(text))), data.draw(st.text("[]{}&*!|>:-#'\"\n\ta1", max_size=3))
    check(lambda: config(text[:at] + new + text[at + len(new) :]))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
def test_any_file_is_a_configuration_or_a_config_error(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "c.yaml")
        file.write_bytes(content)
        check(lambda: load(file))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 20_000,
        "{a: " * 5_000,
        "- " * 5_000,
        "&a [*a]",
        "target: &a {model: *a}",
        "target: {model: x}\ndrafters: &d {a: *d}",
        "target: {model: x}\ndrafters: {a: &b {method: [*b]}}",
        # a billion laughs: ten aliases of ten aliases of ...
        "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)),
        "l: &l0 [x]\n"
        + "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 12))
        + "target: {model: *l11, dtype: *l11}\ndrafters: {d: {method: *l11}}",
        "target: {model: x}\n" + "".join(f"k{i}: 1\n" for i in range(5_000)),
        "!!python/object/apply:os.system ['true']",
        "? [a, {b: c}]\n: 1",
        "%YAML 9.9\n---\na",
        "a: 1\n---\nb: 2",
        "\x00",
        'target: {model: "\\ud800"}',
        '"\\ud800": 1\ntarget: {model: x}',
    ],
    ids=range(17),
)
def test_hostile_files(text: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as fault:
        load(file)
    assert len(str(fault.value)) < 20_000


@given(st.integers(-2, 20), st.integers(-2, 10))
def test_drafts_fit_into_the_node_limit(gamma: int, width: int) -> None:
    text = speculation(f"gamma: {gamma}, tree_width: {width}")
    fits = 1 <= gamma <= 16 and 1 <= width <= 8 and gamma * width <= MAX_TREE_NODES
    if fits:
        assert config(text).tenants["a"].speculation.gamma == gamma
    else:
        with pytest.raises(ConfigError):
            config(text)
