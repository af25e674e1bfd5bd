"""What people see of the controller, as one JSON-able dict: the page, `gammaray top` and metrics show it."""

from __future__ import annotations

from typing import Any

import numpy as np

from gammaray.routing import measures
from gammaray.routing.audit import record
from gammaray.routing.book import Book, Cls
from gammaray.routing.diagnosis import diagnose, usual
from gammaray.routing.evidence import EXCUSED, Evidence, sums
from gammaray.routing.gallery import Gallery, Samples
from gammaray.routing.heatmap import SAMPLES, heatmap
from gammaray.routing.histogram import bimodal, histogram, peaks, quantiles
from gammaray.routing.states import Unit
from gammaray.routing.units import CODES
from gammaray.routing.window import CAUSES, COLUMN, Counts
from gammaray.types import WARMUP_CLASS, PolicySnapshot

PERCENTS = (50, 95, 99)
NO_SAMPLES = Samples()
Json = dict[str, Any]


def overview(
    book: Book, evidence: Evidence, gallery: Gallery, policy: PolicySnapshot, now: float, limit: int
) -> Json:
    """Numbers are of the last minute; None: unknown."""
    busiest = _busiest(book, evidence)[:limit]
    age_s = None if gallery.ticked is None else now - gallery.ticked
    silent = age_s is None or age_s > 3 * gallery.interval_s
    return {
        "time": now,
        "version": policy.version,
        "speculation": policy.speculation,
        "interval_s": gallery.interval_s,
        "controller": {"state": "silent" if silent else "ok", "age_s": age_s},
        "tenants": _tenants(book, evidence, gallery, policy, busiest),
        "decisions": [record(one) for one in reversed(gallery.decisions)],
        "throughput": list(gallery.throughput),
        "tenant_count": len(book.tenants),
        "states": _states(book),
        "heatmap": [found for name in busiest if (found := heat(name, gallery))],
        "slowest": _slowest(gallery),
        **_cluster(evidence, gallery, len(book.keys)),
    }


def _busiest(book: Book, evidence: Evidence) -> list[str]:
    """Tenants by the tokens they got; those that nobody has seen come last."""
    counts = evidence.recent(np.arange(len(book.keys)))
    tokens = np.bincount(book.keys.column("owner"), counts[:, COLUMN["emitted"]], len(book.tenant))
    seen = {name: tokens[place] for name, place in book.tenant.at.items()}
    return sorted(book.tenants, key=lambda name: (-seen.get(name, 0.0), name))


def _tenants(
    book: Book, evidence: Evidence, gallery: Gallery, policy: PolicySnapshot, names: list[str]
) -> list[Json]:
    rows = [_rows(book, name) for name in names]
    drafting = _pooled(evidence, [[row for row in own if book.keys.column("used")[row]] for own in rows])
    everything = _pooled(evidence, rows)
    numbers, loads = _numbers(drafting), _loads(everything, evidence.seconds(gallery.interval_s))
    return [
        {
            "tenant": name,
            "region": book.tenants[name].region,
            **_stand(book.tenant.of(name)),
            **numbers[i],
            "KRR": None,
            **loads[i],
            "ttft_ms": _first_ms(gallery.tenants.get(name, NO_SAMPLES)),
            "causes": _causes(everything[i]),
            "classes": _classes(book, evidence, gallery, policy, name),
        }
        for i, name in enumerate(names)
    ]


def _rows(book: Book, tenant: str) -> list[int]:
    """Without synthetic requests."""
    return [
        row
        for cls in book.classes_of(tenant)
        if cls[1] != WARMUP_CLASS
        for row in book.rows("class", book.classes.at[cls])
    ]


def _pooled(evidence: Evidence, groups: list[list[int]]) -> Counts:
    """[groups, SPAN] recent counts of rows by group."""
    rows = np.array([row for group in groups for row in group], np.intp)
    group = np.array([i for i, own in enumerate(groups) for _ in own], np.intp)
    return sums(evidence.recent(rows), group, len(groups))


def _classes(
    book: Book, evidence: Evidence, gallery: Gallery, policy: PolicySnapshot, tenant: str
) -> list[Json]:
    return [
        {
            "class": cls[1],
            **_stand(book.classes.of(cls)),
            "drafter": book.drafter(cls),
            "keys": _keys(book, evidence, gallery, policy, cls),
        }
        for cls in book.classes_of(tenant)
    ]


def _keys(book: Book, evidence: Evidence, gallery: Gallery, policy: PolicySnapshot, cls: Cls) -> list[Json]:
    rows = [row for row in book.rows("class", book.classes.at[cls]) if book.key(row)[2] is not None]
    counts = evidence.recent(np.array(rows, np.intp))
    numbers = _numbers(counts)
    more = {
        "TWE": measures.tree_width_effective(counts),
        "node_yield": measures.node_yield(counts),
        "level_acceptance": measures.level_acceptance(counts),
        "draft_efficiency": measures.draft_efficiency(counts),
    }
    return [
        _key(book, gallery, policy, row)
        | numbers[i]
        | {name: _number(each[i]) for name, each in more.items()}
        for i, row in enumerate(rows)
    ]


def _key(book: Book, gallery: Gallery, policy: PolicySnapshot, row: int) -> Json:
    """Its own state; what it may do is also up to its class and tenant."""
    key, unit = book.key(row), book.keys.all[row]
    allowed, alphas = policy.of(key), np.array(gallery.alphas.get(key, ()))
    limits = book.keys.limits[row]
    return {
        "drafter": key[2],
        "method": book.methods.get(key[2] or ""),
        **_stand(unit),
        "until": unit.until,
        "gamma": min(allowed.gamma, limits.gamma),
        "width": min(allowed.width, limits.width),
        "share": allowed.share,
        "histogram": histogram(alphas).tolist(),
        "peaks": peaks(alphas) if len(alphas) else [],
        "bimodal": bimodal(alphas),
        "quantiles": quantiles(alphas),
    }


def _stand(unit: Unit) -> Json:
    return {"state": unit.state, "since": unit.since, "reason": unit.reason}


def _numbers(counts: Counts) -> list[Json]:
    """Of [N, WIDTH] counts of drafting keys."""
    low, high = measures.speedup_bounds(counts)
    columns = {
        "alpha": measures.alpha(counts),
        "tau": measures.tau(counts),
        "S": measures.speedup(counts),
        "S_low": low,
        "S_high": high,
        "FR": measures.fallback_rate(counts, np.zeros(len(counts), np.bool_)),
        "SE": measures.se(counts),
    }
    return [{name: _number(each[i]) for name, each in columns.items()} for i in range(len(counts))]


def _loads(counts: Counts, seconds: float) -> list[Json]:
    times = {f"p{percent}": measures.tpot_quantile(counts, percent / 100) for percent in PERCENTS}
    return [
        {
            "requests_per_s": float(counts[i, COLUMN["finished"]]) / seconds,
            "tokens_per_s": float(counts[i, COLUMN["emitted"]]) / seconds,
            "tpot_ms": {name: _number(1e3 * each[i]) for name, each in times.items()},
        }
        for i in range(len(counts))
    ]


def _causes(counts: Counts) -> Json:
    """[SPAN] with those lost requests that FR leaves out."""
    found: dict[str, int] = {cause: int(counts[COLUMN[cause]]) for cause in CAUSES}
    return found | {"worker_lost": found["worker_lost"] + int(counts[EXCUSED])}


def _first_ms(samples: Samples) -> Json:
    known = 1e3 * np.array(samples.first_s)
    times = np.percentile(known, PERCENTS).tolist() if len(known) else [None] * len(PERCENTS)
    return {f"p{percent}": time for percent, time in zip(PERCENTS, times, strict=True)}


def _states(book: Book) -> Json:
    """Keys by state, also those that are not shown."""
    codes = book.keys.column("state")[book.keys.column("used")]
    return dict(zip(CODES, np.bincount(codes, minlength=len(CODES)).tolist(), strict=True))


def heat(tenant: str, gallery: Gallery) -> Json | None:
    """None: it has too few samples."""
    pairs = gallery.tenants.get(tenant, NO_SAMPLES).pairs
    if len(pairs) < SAMPLES:
        return None
    prompts, alphas = zip(*pairs, strict=True)
    return heatmap(tenant, np.array(prompts), np.array(alphas))


def _slowest(gallery: Gallery) -> list[Json]:
    others = usual(gallery.finished)
    return [
        {
            "request_id": ended.request_id,
            "tenant": ended.tenant,
            "class": ended.request_class,
            "drafter": ended.drafter,
            "state": ended.state,
            "ttft_ms": 1e3 * ended.first_s,
            "tpot_ms": None if ended.per_token_s is None else 1e3 * ended.per_token_s,
            "prompt_tokens": ended.prompt_tokens,
            "output_tokens": ended.output_tokens,
            "alpha": ended.stats.acceptance,
            "fallback": ended.fallback,
            "diagnosis": diagnose(ended, others, phases),
        }
        for ended, phases in gallery.slowest
    ]


def _cluster(evidence: Evidence, gallery: Gallery, rows: int) -> Json:
    phases, windows = gallery.phases, gallery.windows
    counts = evidence.recent(np.arange(rows))
    target_krr, draft_krr = measures.kv_reuse(phases)
    return {
        "phases": {
            "draft_s": phases.draft_s,
            "verify_s": phases.verify_s,
            "schedule_s": phases.schedule_s,
            "commit_s": phases.commit_s,
            "draft_per_token_over_AR": measures.draft_latency(phases, counts),
        },
        "memory": {
            "target_kv_used": sum(window.kv_used_blocks for window in windows),
            "target_kv_total": sum(window.kv_total_blocks for window in windows),
            "target_krr": target_krr,
            "draft_krr": draft_krr,
        },
    }


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
