"""The tenants as they are now: who has which key, and what each may do. They change while the server runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from gammaray.api.auth import Identity, Keyring
from gammaray.api.limits import Limiter
from gammaray.config import Config, Tenant
from gammaray.errors import Unauthorized


class Tenancy:
    """Requests read it in the event loop; any one other thread may call `employ` and `charge`."""

    def __init__(
        self,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`clock` (s) counts rate limits, `wall` (s, Unix) knows when a day is over."""
        self._clocks = clock, wall
        self._limiters: Mapping[str, Limiter] = {}
        self._take(config)

    def employ(self, tenants: Mapping[str, Tenant]) -> None:
        """They replace all that there were. What a tenant has open, and did lately, goes on counting."""
        self._take(self.config.model_copy(update={"tenants": tenants}))

    def charge(self, used: Mapping[str, int], until: float) -> None:
        """Tokens of the day that ends at `until` (s, Unix), by tenant."""
        for name, limiter in self._limiters.items():
            limiter.used_until = used.get(name, 0), until

    def admit(self, path: str, authorization: Sequence[bytes]) -> Identity:
        """See Keyring."""
        return self._keys.admit(path, authorization)

    def slot(self, tenant: str) -> AbstractContextManager[None]:
        """See Limiter. Raises Unauthorized when the tenant has gone since it was let in."""
        limiter = self._limiters.get(tenant)
        if limiter is None:
            raise Unauthorized("nobody has this API key", code="invalid_api_key")
        return limiter.slot()

    def _take(self, config: Config) -> None:
        """Whoever reads meanwhile sees the old tenants or the new ones: a key comes after its limits."""
        kept = self._limiters
        for name in config.tenants.keys() & kept.keys():
            kept[name].limits = config.tenants[name].limits
        self._limiters = {
            name: kept.get(name) or Limiter(tenant.limits, *self._clocks)
            for name, tenant in config.tenants.items()
        }
        self.config = config
        self._keys = Keyring(config)
