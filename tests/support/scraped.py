"""Prometheus' text, read back."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

Sample = tuple[dict[str, str], float]


def samples(text: bytes, name: str, **labels: str) -> list[Sample]:
    """Those of series `name` that have all of `labels`."""
    families = text_string_to_metric_families(text.decode())
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return [(s.labels, s.value) for s in found if labels.items() <= s.labels.items()]


def value(text: bytes, name: str, **labels: str) -> float:
    """Of the only sample with these labels."""
    [(_, found)] = samples(text, name, **labels)
    return found
