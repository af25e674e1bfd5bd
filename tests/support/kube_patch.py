"""How a Kubernetes API server reads and merges what clients send it: for the fake one of tests."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import yaml

MAGIC = b"k8s\0"  # before every object in protobuf


def decoded(content: str, body: bytes) -> Any:
    """JSON, YAML, or a Secret in protobuf: Helm 4 writes its own records like that."""
    if not body.startswith(MAGIC):
        return json.loads(body) if content.endswith("json") else yaml.load(body, yaml.CSafeLoader)
    raw = next(value for number, value in _fields(body[len(MAGIC) :]) if number == 2)
    secret: dict[str, Any] = {"metadata": {"labels": {}}, "data": {}}
    for number, value in _fields(raw):
        if number == 1:
            secret["metadata"] |= _metadata(value)
        elif number == 2:
            entry = dict(_fields(value))
            secret["data"][entry[1].decode()] = base64.b64encode(entry[2]).decode()
        elif number == 3:
            secret["type"] = value.decode()
    return secret


def _metadata(raw: bytes) -> dict[str, Any]:
    found = list(_fields(raw))
    labels = [dict(_fields(value)) for number, value in found if number == 11]
    about: dict[str, Any] = {"labels": {pair[1].decode(): pair[2].decode() for pair in labels}}
    return about | {"name": next(value.decode() for number, value in found if number == 1)}


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        value, at = _varint(raw, at)
        if tag & 7 == 2:
            yield tag >> 3, raw[at : at + value]
            at += value
        else:
            yield tag >> 3, value


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at


def patched(held: dict[str, Any], sent: Any, content: str) -> dict[str, Any]:
    """What an object becomes. Server-side apply has one manager here: what it no longer sends is gone."""
    if content == "application/strategic-merge-patch+json":
        return _strategic(held, sent)
    if content == "application/merge-patch+json":
        return _merged(held, sent)
    kept: dict[str, Any] = sent
    return kept


def _merged(held: Any, sent: Any) -> Any:
    if not isinstance(sent, dict):
        return sent
    result = dict(held) if isinstance(held, dict) else {}
    for name, value in sent.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merged(result.get(name), value)
    return result


def _strategic(held: Any, sent: dict[str, Any]) -> dict[str, Any]:
    """The client names the key by which a list is merged: the order that it sends holds nothing else."""
    if sent.get("$patch") == "replace":
        return {name: value for name, value in sent.items() if name != "$patch"}
    result = dict(held) if isinstance(held, dict) else {}
    for name, value in sent.items():
        order = sent.get(f"$setElementOrder/{name}")
        if name.startswith("$"):
            continue
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            result[name] = _strategic(result.get(name), value)
        elif order and isinstance(order[0], dict):
            result[name] = _list(result.get(name, []), value, order)
        else:
            result[name] = value
    return result


def _list(held: list[Any], sent: list[Any], order: list[dict[str, Any]]) -> list[Any]:
    key = next(iter(order[0]))
    result = {entry[key]: entry for entry in held}
    for entry in sent:
        if entry.get("$patch") == "delete":
            result.pop(entry[key], None)
        else:
            result[entry[key]] = _strategic(result.get(entry[key]), entry)
    ordered = [entry[key] for entry in order]
    return sorted(result.values(), key=lambda entry: [*ordered, entry[key]].index(entry[key]))
