"""Prometheus' text format (0.0.4), of OpenTelemetry's points.

OpenTelemetry's own exporter takes five times as long, and this runs beside an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, chain

from opentelemetry.sdk.metrics.export import DataPointT, HistogramDataPoint, MetricsData, NumberDataPoint

from gammaray.telemetry.names import METRICS, Metric

BY_NAME = {metric.name: metric for metric in METRICS}
ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

Labels = Mapping[str, object]


def render(data: MetricsData | None, common: Labels) -> str:
    """Every family of names.METRICS in `data`. `common`: labels of every sample."""
    if data is None:
        return ""
    scopes = (scope for resource in data.resource_metrics for scope in resource.scope_metrics)
    found = (metric for scope in scopes for metric in scope.metrics)
    lines = (_lines(BY_NAME[one.name], one.data.data_points, common) for one in found)
    return "".join(f"{line}\n" for line in chain.from_iterable(lines))


def family(name: str, kind: str, description: str, samples: Iterable[tuple[Labels, float]]) -> Iterator[str]:
    """The lines of a family without buckets."""
    yield from _head(name, kind, description)
    for labels, value in samples:
        yield f"{name}{{{pairs(labels)}}} {value}"


def pairs(labels: Labels) -> str:
    """What stands between the braces."""
    return ",".join(
        f'{name.replace(".", "_")}="{str(value).translate(ESCAPES)}"' for name, value in labels.items()
    )


def _head(name: str, kind: str, description: str) -> tuple[str, str]:
    return f"# HELP {name} {description}", f"# TYPE {name} {kind}"


def _lines(metric: Metric, points: Iterable[DataPointT], common: Labels) -> Iterator[str]:
    name = metric.prometheus
    yield from _head(name, metric.kind, metric.description)
    for point in points:
        labels = pairs({**common, **(point.attributes or {})})
        if isinstance(point, HistogramDataPoint):
            yield from _histogram(name, labels, point)
        elif isinstance(point, NumberDataPoint):
            yield f"{name}{{{labels}}} {point.value}"


def _histogram(name: str, labels: str, point: HistogramDataPoint) -> Iterator[str]:
    """Counts of a bucket include those of the buckets below."""
    bounds = chain(map(float, point.explicit_bounds), ["+Inf"])
    for bound, count in zip(bounds, accumulate(point.bucket_counts), strict=True):
        yield f'{name}_bucket{{{labels},le="{bound}"}} {count}'
    yield f"{name}_sum{{{labels}}} {point.sum}"
    yield f"{name}_count{{{labels}}} {point.count}"
