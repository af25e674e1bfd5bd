"""A running application as its tenants, its operator and its monitoring see it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gammaray.api.auth import EVENTS, fingerprint, fresh_key

from .otlp import Receiver
from .scraped import samples

BOARDS = sorted((Path(__file__).parents[2] / "telemetry" / "dashboards").glob("*.json"))
OPERATOR = "operator"  # who has a key besides the tenants
ANSWER_S = 120.0


@dataclass(frozen=True)
class Live:
    """`port`: of the metrics of the node; `keys`: by tenant."""

    url: str
    model: str
    port: int
    keys: dict[str, str] = field(repr=False)

    def ask(self, tenant: str, prompt: str, route: str = "completions", **more: Any) -> httpx.Response:
        chat = route == "chat/completions"
        asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        headers = more.pop("headers", {})
        return self._request("POST", f"/v1/{route}", tenant, {"model": self.model, **asked, **more}, headers)

    def operate(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return self._request(method, path, OPERATOR, body)

    def metrics(self) -> bytes:
        """Of the node's own endpoint."""
        return httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=ANSWER_S, trust_env=False).content

    def count(self, name: str, **labels: str) -> float:
        """Of a counter or gauge, over everything that it tells apart besides `labels`."""
        lines = [line for line in self.metrics().splitlines(keepends=True) if name.encode() in line]
        return sum(value for _, value in samples(b"".join(lines), name, **labels))

    def events(self, count: int) -> list[str]:
        """The first ones of the live page."""
        with httpx.stream(
            "GET", f"{self.url}{EVENTS}", headers=self._header(OPERATOR), timeout=ANSWER_S, trust_env=False
        ) as answer:
            lines = (line for line in answer.iter_lines() if line)
            return [line.removeprefix("data: ") for line, _ in zip(lines, range(count), strict=False)]

    def _request(
        self, method: str, path: str, who: str, body: Any = None, more: dict[str, str] | None = None
    ) -> httpx.Response:
        sent = None if body is None else json.dumps(body)
        headers = {
            **self._header(who),
            **({"content-type": "application/json"} if sent else {}),
            **(more or {}),
        }
        return httpx.request(
            method, f"{self.url}{path}", content=sent, headers=headers, timeout=ANSWER_S, trust_env=False
        )

    def _header(self, who: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[who]}"}


def keys_of(tenants: Iterable[str]) -> tuple[dict[str, str], dict[str, list[dict[str, str]]]]:
    """A key for each tenant and for the operator, and what the configuration has of them."""
    keys = {name: fresh_key() for name in (*tenants, OPERATOR)}
    return keys, {n: [{"name": n, "sha256": fingerprint(key.encode())}] for n, key in keys.items()}


def queries(**variables: str) -> list[tuple[str, str]]:
    """(where, expression) of every panel of the dashboards, with its variables filled in."""
    filled = {"$__rate_interval": "5m", "$class": ".*", "$drafter": ".*"}
    filled |= {f"${name}": value for name, value in variables.items()}
    found = []
    for board in BOARDS:
        for panel in json.loads(board.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expression = target["expr"]
                for variable, value in filled.items():
                    expression = expression.replace(variable, value)
                found.append((f"{board.stem}: {panel['title']}, {target['refId']}", expression))
    return found


def of_trace(collector: Receiver, trace_id: str) -> list[list[Any]]:
    """The spans that came of it, by export: one has those of one process."""
    found = [
        [
            span
            for resource in getattr(export, "resource_spans", ())
            for scope in resource.scope_spans
            for span in scope.spans
            if span.trace_id.hex() == trace_id
        ]
        for export in list(collector.exports)
    ]
    return [spans for spans in found if spans]
