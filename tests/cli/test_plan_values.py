"""`gammaray plan --values`: what a release of the chart would place, told before anyone installs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.charts import EVERY
from support.helm import CHART, CI, rendered

from gammaray.cluster.chart_values import DEFAULTS, merged
from gammaray.cluster.plans import Plan
from gammaray.cluster.release import plan_values, release
from gammaray.errors import ConfigError

TARGET = {"target": {"model": "org/target-8B", "max_model_len": 4096}}
SMALL = {"drafters": {"small": {"method": "model", "model": "org/draft-1B"}}}
DRAFTS = {**TARGET, **SMALL, "tenants": {"default": {"drafter": "small"}}}
OPERATORS = {"operator": {"existingSecret": "x"}}
PAIR = {"gpus": 2, "accelerator": "NVIDIA-H100-80GB-HBM3"}


def files(folder: Path, *values: dict[str, Any]) -> list[Path]:
    """One values file each."""
    made = [folder / f"values-{number}.yaml" for number in range(len(values))]
    for file, content in zip(made, values, strict=True):
        file.write_text(yaml.safe_dump(content))
    return made


def planned(folder: Path, pools: dict[str, Any], config: dict[str, Any] = DRAFTS, *topology: str) -> Plan:
    return plan_values(files(folder, {"config": config, "pools": {"main": None, **pools}}), topology)


def modes(plan: Plan) -> list[str]:
    return [placed.mode for placed in plan.placements if placed.role == "draft"]


def matrix(file: Path, cell: str, gpus: int = 2) -> Path:
    cells = [["X" if i == j else cell for j in range(gpus)] for i in range(gpus)]
    file.write_text(json.dumps({"matrix": cells}))
    return file


def test_defaults_are_those_of_the_chart() -> None:
    """Else a plan is for a release that nobody gets."""

    def asked(ours: object, theirs: Any) -> Any:
        if not (isinstance(ours, dict) and ours):
            return theirs
        return {key: asked(value, theirs[key]) for key, value in ours.items()}

    ours, chart = yaml.safe_load(DEFAULTS), yaml.safe_load((CHART / "values.yaml").read_text())
    assert asked(ours, chart) == ours
    assert (ours["config"], ours["pools"]) == (chart["config"], chart["pools"])


@pytest.mark.parametrize("major", ["3", "4"])
def test_values_are_merged_as_helm_does(major: str, tmp_path: Path) -> None:
    """Maps level by level, lists as a whole, null takes a default away, also one that is overridden."""
    shown = (
        "kind: ConfigMap\napiVersion: v1\nmetadata: {name: seen}\ndata: {all: {{ toJson .Values | quote }}}"
    )
    first = {
        "config": {**DRAFTS, "tenants": {"chat": {"drafter": "small", "region": "eu"}}},
        "pools": {"main": None, "a": {**PAIR, "tolerations": [{"key": "a"}, {"key": "b"}]}},
        "extraObjects": [shown],
    }
    second = {
        "config": {"drafters": {"lookup": None}, "tenants": {"chat": {"region": None}, "default": None}},
        "pools": {"a": {"tolerations": [{"key": "c"}]}},
        "poolDefaults": {"gpus": 2, "accelerator": None},
    }
    made = files(tmp_path, first, second)
    found = rendered(major, *(part for file in made for part in ("--values", file)))
    (seen,) = (each for each in found if each["metadata"]["name"] == "seen")
    ours, theirs = merged(made), json.loads(seen["data"]["all"])
    assert {key: theirs[key] for key in ("config", "pools", "keys")} == {
        key: ours[key] for key in ("config", "pools", "keys")
    }
    assert ours["poolDefaults"].items() <= theirs["poolDefaults"].items()
    assert "accelerator" not in ours["poolDefaults"] and "accelerator" not in theirs["poolDefaults"]


@pytest.mark.parametrize("file", [*CI, EVERY], ids=lambda file: file.stem)
def test_a_plan_is_for_what_the_chart_renders(file: Path) -> None:
    """The same pods, and the same configuration but for where HTTP listens: else one of both is wrong."""
    (service,) = (found for found in rendered("4", "--values", file) if found["kind"] == "RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    arguments, values = application["args"], merged([file])
    waited = {pool: pods for pool, pods in arguments["pools"].items() if pool != arguments["ingress"]["pool"]}
    assert Counter(pod.pool for pod in release(values, {}).pods) == waited
    assert arguments["config"]["server"].pop("host") == "0.0.0.0"
    assert arguments["config"] == values["config"]


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_every_example_has_a_place_and_no_idle_pool(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as it lies there, so that the examples of the chart show what can be served."""
    monkeypatch.setattr("gammaray.cluster.checkpoint._cached", lambda model: None)
    made = plan_values([file])
    assert made.placements and made.unplaced == ()
    assert not any("hold nothing" in note or "nothing is placed" in note for note in made.notes)
    assert not any("would refuse it" in note for note in made.notes)


def test_the_h100_example_drafts_beside_each_replica(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gammaray.cli", "plan", "--json"]
    command += ["--values", str(CHART / "ci" / "h100-node-values.yaml")]
    environment = {"HF_HUB_CACHE": str(tmp_path / "none"), "PATH": "", "PYTHONUTF8": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert [(p["role"], p["node"], p["gpus"], p["mode"]) for p in found["placements"]] == [
        (role, "h100-0", [2 * replica + (role == "draft")], "split")
        for replica in range(4)
        for role in ("target", "draft")
    ]
    assert any("h100: all GPUs of a pod are taken to be linked by NVSwitch" in n for n in found["notes"])


@pytest.mark.parametrize(
    ("accelerator", "mode"),
    [
        ("NVIDIA-H100-80GB-HBM3", "split"),
        ("NVIDIA-H200", "split"),
        ("NVIDIA-B200", "split"),
        ("NVIDIA-H100-PCIe", "same-gpu"),
        ("NVIDIA-H100-NVL", "same-gpu"),
        ("NVIDIA-L40S", "same-gpu"),
        ("NVIDIA-A100-SXM4-80GB", "same-gpu"),  # NVLink 3
        ("NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", "same-gpu"),
        ("", "same-gpu"),
    ],
)
def test_links_are_assumed_only_where_the_name_tells(accelerator: str, mode: str, tmp_path: Path) -> None:
    made = planned(tmp_path, {"a": {**PAIR, "accelerator": accelerator}})
    assert modes(made) == [mode]
    assert made.notes[0].startswith("pool a: ") and "--topology a=FILE" in made.notes[0]


def test_a_saved_matrix_comes_before_the_name(tmp_path: Path) -> None:
    """And each pod is a node of its own, although both are told by one file."""
    pcie, bridged = matrix(tmp_path / "pcie.json", "SYS"), matrix(tmp_path / "nv.json", "NV4")
    config = {**DRAFTS, "target": {**TARGET["target"], "replicas": 2}}
    config["tenants"] = {"default": {"drafter": "small", "pool": {"workers": 2}}}
    pools = {"a": {**PAIR, "replicas": 2}}
    assert modes(planned(tmp_path, pools, config, f"a={pcie}")) == ["same-gpu"] * 2
    pools["a"]["accelerator"] = "NVIDIA-H100-NVL"
    made = planned(tmp_path, pools, config, f"a={bridged}")
    assert modes(made) == ["split"] * 2 and {p.node for p in made.placements} == {"a-0", "a-1"}
    assert len({uuid for placed in made.placements for uuid in placed.uuids}) == 4
    assert not any("--topology" in note for note in made.notes)


@pytest.mark.parametrize(
    ("pool", "target", "says"),
    [
        (PAIR, {"tensor_parallel": 2}, "replica 0"),  # which would fit, and the engine refuses
        ({"resources": {"memory": "12Gi"}}, {}, "1 replica of the target on a-0"),
        ({**PAIR, "gpuMemory": "8Gi"}, {}, "replica 0"),  # 16 GB of weights
        ({**PAIR, "accelerator": "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb"}, {"model": "org/t-30B"}, "replica 0"),
        ({"resources": {"cpu": "1500m"}}, {"replicas": 3}, "3 replicas of the target on a-0"),
    ],
)
def test_what_does_not_fit_is_a_finding(
    pool: dict[str, Any], target: dict[str, Any], says: str, tmp_path: Path
) -> None:
    fits = planned(tmp_path, {"a": {**PAIR}}, TARGET)
    assert fits.unplaced == ()
    made = planned(tmp_path, {"a": pool}, {"target": {**TARGET["target"], **target}})
    assert any(says in missing.what for missing in made.unplaced), made.unplaced


def test_pools_that_hold_nothing_are_told(tmp_path: Path) -> None:
    """The chart's own pool is easily forgotten; GPUs cost more."""
    values = {"config": TARGET, "pools": {"a": {**PAIR, "replicas": 2}}}
    notes = plan_values(files(tmp_path, values)).notes
    assert "pool main: nothing is placed on its 1 pod" in notes
    assert "pool a: 3 of 4 GPUs hold nothing" in notes


@pytest.mark.parametrize(
    ("values", "topology", "says"),
    [
        ({"pools": {"main": None}}, [], "no pod that could hold a replica"),
        ({"pools": {"main": {"gpus": "8"}}}, [], "pools.main.gpus: .*integer"),
        ({"pools": {"main": {"gpus": 1, "gpuMemory": "80 GB"}}}, [], "pools.main.gpuMemory: .*80Gi"),
        ({"pools": {"h100": PAIR}}, ["h200=x.json"], "did you mean 'h100'"),
        ({"pools": {"h100": PAIR}}, ["x.json"], "POOL=FILE"),
        ({"pools": {"h100": PAIR}}, ["h100=nowhere.json"], "cannot read topology"),
        ({"config": {"target": {"modell": "x"}}}, [], "config: target.modell: unknown key"),
        ({"config": {"server": {"require_api_key": True}}}, [], "no tenant has api_keys"),
        ({"keys": {"tenants": {"caht": {"existingSecret": "x"}}}}, [], "keys.tenants.caht: no tenant"),
        ({"config": None}, [], "config: expected a mapping"),
        ({"config": {"server": 8000}, "keys": OPERATORS}, [], "config.server: expected a mapping"),
        (
            {"config": {"server": {"operator_keys": 3}}, "keys": OPERATORS},
            [],
            "operator_keys: expected a list",
        ),
        ({"pools": {"main": 8}}, [], "pools.main: expected a mapping"),
        ({"poolz": {}}, [], "poolz: unknown key; did you mean 'pools'"),
        ({"pools": {"main": {"gpu": 1}}}, [], "pools.main.gpu: unknown key; did you mean 'gpus'"),
        ({"poolDefaults": {"replica": 1}}, [], "poolDefaults.replica: unknown key; did you mean 'replicas'"),
        ({"image": {"repositry": "x"}}, [], "image.repositry: unknown key; did you mean 'repository'"),
        ({"monitoring": {"enabled": True}}, [], "monitoring.enabled: unknown key; known here: dashboards"),
        ({"keys": {"tenants": {"default": {"secret": "x"}}}}, [], "default.secret: unknown key"),
    ],
)
def test_bad_values_are_told(values: dict[str, Any], topology: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_values(files(tmp_path, values), topology)


def test_files_that_are_not_values_are_told(tmp_path: Path) -> None:
    """A list, as of a kustomization, and no file at all."""
    file = tmp_path / "values.yaml"
    with pytest.raises(ConfigError, match=r"cannot read values .*No such file"):
        plan_values([file])
    file.write_text("- config: {}\n")
    with pytest.raises(ConfigError, match="expected a mapping"):
        plan_values([file])


def test_a_matrix_of_the_whole_node_is_not_that_of_a_pod(tmp_path: Path) -> None:
    """The device plugin chooses the GPUs of a pod: to take the first ones would be a guess."""
    file = matrix(tmp_path / "node.json", "NV18", gpus=8)
    with pytest.raises(ConfigError, match="has 8 GPUs, but a pod of pool a has 2 GPUs"):
        planned(tmp_path, {"a": PAIR}, DRAFTS, f"a={file}")


def test_keys_of_secrets_count_as_keys(tmp_path: Path) -> None:
    config = {"tenants": {"chat": {}}, "server": {"require_api_key": True, "protect_metrics": True}}
    keys = {"tenants": {"chat": {"existingSecret": "chat"}}, "operator": {"existingSecret": "operator"}}
    assert plan_values(files(tmp_path, {"config": config, "keys": keys})).unplaced == ()


def test_a_configuration_beside_values_is_bad_input(tmp_path: Path) -> None:
    (values,) = files(tmp_path, {})
    command = [sys.executable, "-m", "gammaray.cli", "plan", str(values), "--values", str(values)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "give neither beside it" in done.stderr
