"""Which drafter version a tenant's class runs, which one is on trial, and the way back.

A version is an entry of `drafters`, that was admitted. A trial has two parts: in the shadow, then live on a
share of requests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from gammaray.errors import ConfigError, InvalidRequest, NotFound
from gammaray.papers import Papers, refusal

Stage = Literal["candidate", "current", "previous", "rejected"]
Identity = tuple[str | None, str]
KEPT = 8  # previous versions of a line, and rejected ones


@dataclass(frozen=True, slots=True)
class Version:
    """A drafter as it was configured, `since` when it has its stage (s), and the reason for that."""

    drafter: str | None  # None: plain decoding
    version: str = ""
    method: str = "plain"
    since: float = 0.0
    reason: str = ""

    @property
    def identity(self) -> Identity:
        return self.drafter, self.version

    def __str__(self) -> str:
        return f"{self.drafter} (version {self.version})" if self.drafter else "plain decoding"


PLAIN = Version(None)


@dataclass(frozen=True, slots=True)
class Line:
    """The versions of one class of a tenant: always exactly one is current. Tuples: newest first."""

    configured: Version  # what the tenant's configuration names
    current: Version
    candidate: Version | None = None
    live: bool = False  # the candidate has passed its shadow and answers requests
    previous: tuple[Version, ...] = ()
    rejected: tuple[Version, ...] = ()

    def stages(self) -> Iterator[tuple[Stage, Version]]:
        yield "current", self.current
        if self.candidate is not None:
            yield "candidate", self.candidate
        yield from (("previous", version) for version in self.previous)
        yield from (("rejected", version) for version in self.rejected)

    def knows(self, version: Version) -> bool:
        """It has a stage here, so that it is not to be tried by itself once more."""
        return version.identity in {known.identity for _, known in self.stages()}


def admit(version: Version, papers: Papers | None, target: str | None, place: str, model: str) -> Version:
    """The version, which may be configured, put on trial and made current from here on.

    A drafter that `gammaray train` made needs its acceptance report, and must have been made for the weights
    `target` of `model` (None: not known here). `place`: where it is. Raises ConfigError.
    """
    if reason := refusal(f"drafter {version}", papers, target, place, model):
        raise ConfigError(reason)
    return version


def begin(configured: Version) -> Line:
    return Line(configured, configured)


def propose(line: Line, candidate: Version, now: float, reason: str) -> Line:
    """Puts a version on trial, also one that was rejected; another candidate makes way.

    Raises InvalidRequest when it is the current one.
    """
    if candidate.identity == line.current.identity:
        message = f"{candidate} is the current version already; name another one to try"
        raise InvalidRequest(message, param="drafter", code="current_version")
    if line.candidate is not None and line.candidate.identity != candidate.identity:
        line = reject(line, now, f"{candidate} took its place on trial")
    rejected = _without(line.rejected, candidate)
    return replace(line, candidate=_at(candidate, now, reason), live=False, rejected=rejected)


def accept(line: Line, now: float, reason: str) -> Line:
    """The candidate leaves the shadow. Raises NotFound when there is none."""
    return replace(line, candidate=_at(_candidate(line), now, reason), live=True)


def promote(line: Line, now: float, reason: str) -> Line:
    """The candidate is current from now on. Raises NotFound when there is none."""
    current = _at(_candidate(line), now, reason)
    previous = (line.current, *_without(line.previous, current))[:KEPT]
    return replace(line, current=current, candidate=None, live=False, previous=previous)


def reject(line: Line, now: float, reason: str) -> Line:
    """Ends the trial. Raises NotFound when there is none."""
    return replace(_dismiss(line, _candidate(line), now, reason), candidate=None, live=False)


def roll_back(line: Line, now: float, reason: str) -> Line:
    """The previous version is current again, and the one that was is rejected.

    Raises NotFound when there is no previous one.
    """
    if not line.previous:
        message = f"{line.current} has no previous version; pin speculation off to decode plainly"
        raise NotFound(message, param="drafter", code="no_previous_version")
    current, *previous = line.previous
    line = _dismiss(line, line.current, now, reason)
    if line.candidate is not None and line.candidate.identity == current.identity:
        line = replace(line, candidate=None, live=False)
    rejected = _without(line.rejected, current)
    return replace(line, current=_at(current, now, reason), previous=tuple(previous), rejected=rejected)


def configure(line: Line, configured: Version, now: float) -> Line:
    """Follows a changed configuration: what it names is current, whatever was decided before."""
    if configured.identity == line.configured.identity:
        return line
    line = replace(line, configured=configured)
    if configured.identity == line.current.identity:
        return line
    known = replace(line, candidate=configured, rejected=_without(line.rejected, configured))
    promoted = promote(known, now, "the configuration names it")
    if line.candidate is None or line.candidate.identity == configured.identity:
        return promoted
    return replace(promoted, candidate=line.candidate, live=line.live)


def keep(line: Line, present: Collection[Identity]) -> Line:
    """Without previous versions that can no longer run: their entries of `drafters` changed or went."""
    return replace(line, previous=tuple(v for v in line.previous if v.identity in present))


def _candidate(line: Line) -> Version:
    if line.candidate is None:
        raise NotFound("no drafter version is on trial here", param="drafter", code="no_candidate")
    return line.candidate


def _dismiss(line: Line, version: Version, now: float, reason: str) -> Line:
    rejected = (_at(version, now, reason), *_without(line.rejected, version))[:KEPT]
    return replace(line, rejected=rejected)


def _without(versions: tuple[Version, ...], version: Version) -> tuple[Version, ...]:
    return tuple(known for known in versions if known.identity != version.identity)


def _at(version: Version, now: float, reason: str) -> Version:
    return replace(version, since=now, reason=reason)
