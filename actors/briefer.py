"""An ingress's line to the controller: what it hears goes to the router and to the gate."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gammaray.config import Tenant
from gammaray.routing.briefing import Briefing, Predictor
from gammaray.routing.bulletin import Bulletin, Known

logger = logging.getLogger(__name__)

POLL_S = 1.0
Table = NDArray[np.float16]  # [V, DIMS]


class Board(Protocol):
    """Where the controller puts up its bulletins."""

    def bulletin(self, known: Known) -> Bulletin | None:
        """None: what is known is the newest. Raises anything when nobody answers."""
        ...


class Gate(Protocol):
    """gammaray.api.tenancy.Tenancy, which this room may not import."""

    def employ(self, tenants: Mapping[str, Tenant]) -> None:
        """They replace all that there were."""
        ...

    def charge(self, used: Mapping[str, int], until: float) -> None:
        """Tokens of the day that ends at `until` (s, Unix), by tenant."""
        ...


class Briefer:
    """One thread calls `round`. Without a controller everything stays as it was heard last.

    A new tenant is known to the router before the gate lets it in.
    """

    def __init__(
        self,
        board: Board,
        brief: Callable[[Briefing], None],
        gate: Gate,
        embeddings: Callable[[], Table | None] = lambda: None,
    ) -> None:
        """`embeddings`: of the target, see ModelRunner.projection; asked until it has some."""
        self._board, self._brief, self._gate, self._ask = board, brief, gate, embeddings
        self._embeddings: Table | None = None
        self._known = Known()
        self._tenants: Mapping[str, Tenant] | None = None
        self._predictor: Predictor | None = None

    def round(self) -> bool:
        """Whether there was news. Raises what the board raises."""
        news = self._board.bulletin(self._known)
        if news is None:
            return False
        self._tenants = self._tenants if news.tenants is None else news.tenants
        self._predictor = news.predictor or self._predictor
        if self._embeddings is None:
            self._embeddings = self._ask()
        self._brief(self._briefing(news))
        if news.tenants is not None:
            self._gate.employ(news.tenants)
        self._gate.charge(news.used_today, news.day_ends)
        version = self._predictor.version if self._predictor else 0
        self._known = Known(news.edition, news.revision, version)
        return True

    def _briefing(self, news: Bulletin) -> Briefing:
        return Briefing(
            policy=news.policy,
            revision=news.revision,
            tenants=self._tenants,
            priors=news.priors,
            predictor=self._predictor,
            embeddings=self._embeddings,
            concurrency=news.concurrency,
        )


def follow(briefer: Briefer) -> None:
    """Rounds in a thread of its own, one a second, for as long as this process lives."""
    threading.Thread(target=_rounds, args=(briefer,), name="briefer", daemon=True).start()


def _rounds(briefer: Briefer) -> None:
    silent = False
    while True:
        try:
            briefer.round()
            silent = False
        except Exception as error:
            if not silent:
                logger.warning("no controller (%s): tenants and policy stay", type(error).__name__)
            silent = True
        time.sleep(POLL_S)
