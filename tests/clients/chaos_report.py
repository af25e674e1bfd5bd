"""What `make chaos` prints. The generators also yield what is wrong."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from chaos_judge import verdict
from chaos_requests import Case
from chaos_run import CALM, Kill, Run
from server import Server

LATE_S = 10.0
STOP_S = 30.0


def undisturbed(run: Run) -> None:
    streams = f"{len(run.heard)} streams, {CALM} at a time"
    print(f"undisturbed: {streams}: {run.seconds:.0f} s; longest gap {longest(run):.2f} s", flush=True)


def incomplete(cases: Sequence[Case], run: Run) -> Iterator[str]:
    for case, heard in zip(cases, run.heard, strict=True):
        if heard.fault or heard.error or not heard.done:
            yield f"undisturbed: {heard.fault or heard.error or 'no [DONE]'}: {case}"


def disturbed(cases: Sequence[Case], run: Run) -> Iterator[str]:
    print(f"disturbed: {len(cases)} streams at once: {run.seconds:.0f} s; longest gap {longest(run):.2f} s")
    if run.kill:
        _killed(run, run.kill)
    late = [
        heard.last - heard.began - case.trouble.timeout_s
        for case, heard in zip(cases, run.heard, strict=True)
        if case.trouble.timeout_s is not None and heard.error
    ]
    latest = max(late, default=0.0)
    print(f"timeouts: {len(late)}, the latest {latest:.2f} s behind its time")
    if latest > LATE_S:
        yield f"a timeout came {latest:.0f} s behind its time"


def _killed(run: Run, kill: Kill) -> None:
    after = kill.at - min(heard.began for heard in run.heard)
    back = kill.at + kill.ready_s
    during = longest(run, lambda begin, end: begin <= back and end >= kill.at)
    apart = longest(run, lambda begin, end: begin > back or end < kill.at)
    going = [heard for heard in run.heard if heard.last > kill.at]
    begun = sum(bool(heard.choices) and heard.first < kill.at for heard in going)
    print(f"kill -9: after {after:.1f} s, with {begun} streams begun and {len(going) - begun} waiting; a new")
    print(f"  process was there after {kill.process_s:.1f} s and answered after {kill.ready_s:.1f} s")
    print(f"  longest gap that meets this time: {during:.2f} s, apart from it: {apart:.2f} s")


def longest(run: Run, of: Callable[[float, float], bool] = lambda begin, end: True) -> float:
    """Seconds from an event of a choice to its next."""
    return max(
        (end - begin for heard in run.heard for begin, end in heard.gaps if of(begin, end)), default=0.0
    )


def ends(cases: Sequence[Case], rough: Run, calm: Run) -> Iterator[str]:
    counts: Counter[str] = Counter()
    for case, heard, other in zip(cases, rough.heard, calm.heard, strict=True):
        end, fault = verdict(case.trouble, heard, other)
        counts[end] += 1
        if fault:
            yield f"{end}: {fault}: {case}"
    print("ends: " + ", ".join(f"{count} {end}" for end, count in counts.most_common()), flush=True)


def fairness(cases: Sequence[Case], run: Run, queue: int) -> Iterator[str]:
    """With more than `queue` streams, tenants with few of them must wait less than the one with most."""
    waits: dict[str, list[float]] = defaultdict(list)
    for case, heard in zip(cases, run.heard, strict=True):
        if heard.choices:
            waits[case.tenant].append(heard.first - heard.began)
    medians = {tenant: statistics.median(found) for tenant, found in sorted(waits.items())}
    shown = ", ".join(f"{tenant} ({len(waits[tenant])}) {wait:.1f} s" for tenant, wait in medians.items())
    print(f"median wait for the first event: {shown}")
    most = max(waits, key=lambda tenant: len(waits[tenant]))
    if len(cases) > queue and any(wait >= medians[most] for name, wait in medians.items() if name != most):
        yield f"a tenant with few requests waited longer than {most}: {shown}"


def stop(server: Server) -> Iterator[str]:
    print(
        f"SIGTERM: exit code {server.code} after {server.stop_s:.1f} s, {len(server.orphans)} processes left"
    )
    if server.code != 0:
        yield f"the server ended with {server.code}"
    if server.stop_s > STOP_S:
        yield f"the server took {server.stop_s:.0f} s to stop"
    if server.orphans:
        yield f"processes are left: {server.orphans}"
