"""A draft worker: one drafter's model in a process of its own, behind the draft link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from gammaray.actors.place import Place, Whereabouts, cap_memory, leave_no_core, whereabouts
from gammaray.config import Config
from gammaray.engine.threads import compute_with


@dataclass(frozen=True, slots=True)
class Post:
    """What the plan says of one worker of a tenant's pool: what it serves, and where."""

    tenant: str
    drafter: str
    version: str
    worker: int
    place: Place = field(default_factory=Place)
    near: int | None = None  # the target replica that has a direct link to it

    @property
    def pool(self) -> tuple[str, str]:
        return self.tenant, self.drafter

    @property
    def name(self) -> str:
        """Of the actor. Another version or another place is another actor."""
        where = ",".join([*self.place.labels.values(), *self.place.devices])
        return f"draft {self.tenant}/{self.drafter}/{self.version}/{self.worker} @ {where or 'anywhere'}"


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is."""

    sequences: int = 0  # that it drafts for
    queued: int = 0  # frames that wait
    busy: float = 0.0  # share of the last seconds in which it computed


class Link(Protocol):
    """The worker's end of the draft link, which serves in threads of its own."""

    address: Any  # what the replica's end connects to

    def load(self) -> Load:
        """Now."""
        ...

    def check(self) -> None:
        """Raises when it no longer serves."""
        ...


LinkFactory = Callable[[Config, str], Link]  # of the drafter that a configuration calls so


def local_link(config: Config, drafter: str) -> Link:
    """The drafter's own model in this process. Raises ConfigError when it does not fit the target."""
    from gammaray.actors.served import Served
    from gammaray.engine.build import build_apart

    built = build_apart(config, drafter)
    return Served(drafter, built, built.runner.vocab_size)


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says of itself."""

    post: Post
    address: Any
    where: Whereabouts
    load: Load
    draining: bool = False


class DraftWorker:
    """A plain class; actors/crew.py makes it an actor. Its constructor returns when the drafter is loaded."""

    def __init__(self, config: Config, post: Post, link_factory: LinkFactory, threads: int | None) -> None:
        compute_with(post.place.threads(threads))
        cap_memory(post.place)
        leave_no_core()
        self._post = post
        self._link = link_factory(config, post.drafter)
        self._draining = False

    def report(self) -> Report:
        """Raises when the link is broken: the worker is then replaced."""
        self._link.check()
        return Report(self._post, self._link.address, whereabouts(), self._link.load(), self._draining)

    def drain(self) -> None:
        """Replicas are told: no new sequence comes, those that are here go on."""
        self._draining = True
