"""Real engines whose drafters live in processes of their own: texts are those of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from support import serving
from support.checkpoint import save_checkpoint
from support.serving import eventually

from gammaray.api.auth import fingerprint, fresh_key
from gammaray.config import parse

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),  # in Ray itself
]
TENANTS = {"bank": "twin", "shop": "stranger"}  # and the drafter of each
TOKENS = 40
CASES: tuple[dict[str, Any], ...] = (
    {"prompt": "Once upon a time", "temperature": 0.0},
    {"prompt": "one two one two one", "temperature": 1.0, "seed": 7},
    {"prompt": "monday, tuesday", "temperature": 0.8, "top_p": 0.9, "seed": 8},
)
OPERATOR = "operator"


@dataclass
class Split:
    """An application whose drafters are in draft workers."""

    url: str
    model: str
    keys: dict[str, str] = field(repr=False)

    def ask(self, tenant: str, **more: Any) -> httpx.Response:
        body = {"model": self.model, "max_tokens": TOKENS, "n": 2, "logprobs": 0, **more}
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"}
        url = f"{self.url}/v1/completions"
        return httpx.post(url, json=body, headers=headers, timeout=serving.PATIENCE_S, trust_env=False)

    def links(self) -> dict[tuple[str, str], dict[str, Any]]:
        """By tenant and drafter."""
        headers = {"Authorization": f"Bearer {self.keys[OPERATOR]}"}
        url = f"{self.url}/gammaray/v1/health"
        answer = httpx.get(url, headers=headers, timeout=serving.PATIENCE_S, trust_env=False)
        return {(link["tenant"], link["drafter"]): link for link in answer.json()["engine"]["links"]}


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    """One drafter is the target again, so that its drafts are accepted; the other one seldom agrees."""
    import ray

    from gammaray.cluster.run import running

    assert not ray.is_initialized(), "another cluster's fixture is still there"
    folder, keys = tmp_path_factory.mktemp("split"), {name: fresh_key() for name in (*TENANTS, OPERATOR)}
    target = save_checkpoint(folder / "target")
    models = {"twin": target, "stranger": save_checkpoint(folder / "stranger", seed=1)}
    hashes = {name: [{"name": name, "sha256": fingerprint(key.encode())}] for name, key in keys.items()}
    speculation = {"gamma": 4, "tree_width": 2}
    own = {"method": "model", "dtype": "float32", "placement": "split"}
    config = parse(
        {
            "target": {"model": target, "dtype": "float32", "kv": {"num_blocks": 200}},
            "drafters": {name: {**own, "model": model} for name, model in models.items()},
            "tenants": {
                name: {"drafter": drafter, "api_keys": hashes[name], "speculation": speculation}
                for name, drafter in TENANTS.items()
            },
            "server": {
                "port": serving.free_port(),
                "require_api_key": True,
                "operator_keys": hashes[OPERATOR],
            },
        },
        "test",
    )
    with running(config) as url:
        yield Split(url, target, keys)


def said(answer: httpx.Response) -> list[tuple[list[str], str, str]]:
    """Tokens, text and end of each choice."""
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    return [(c["logprobs"]["tokens"], c["text"], c["finish_reason"]) for c in choices]


@pytest.mark.parametrize("tenant", TENANTS)
def test_drafts_come_from_the_workers_and_change_no_text(split: Split, tenant: str) -> None:
    pool = tenant, TENANTS[tenant]
    eventually(lambda: split.links()[pool]["workers"] == 1)
    before = split.links()
    accepted = 0
    for case in CASES:
        plain = split.ask(tenant, **case, speculation={"enabled": False})
        for width in (1, 2):
            fast = split.ask(tenant, **case, speculation={"width": width})
            assert said(fast) == said(plain)
            accepted += fast.json()["metrics"]["speculative_decoding"]["accepted"]
    after = split.links()
    assert after[pool]["drafts"] > before[pool]["drafts"]
    others = [other for other in after if other != pool]
    assert others and all(after[other]["drafts"] == before[other]["drafts"] for other in others)
    assert accepted > TOKENS or pool[1] != "twin"


@pytest.mark.parametrize("tenant", TENANTS)
def test_the_drafter_of_another_tenant_is_refused(split: Split, tenant: str) -> None:
    others = next(drafter for owner, drafter in TENANTS.items() if owner != tenant)
    answer = split.ask(tenant, **CASES[0], speculation={"drafter": others})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("speculation.drafter", "drafter_not_found")
    assert error["message"] == f"no drafter is named '{others}'; available: {TENANTS[tenant]}"
