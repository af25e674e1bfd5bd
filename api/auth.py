"""API keys: who a request comes from, and whether it may go where it wants to."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gammaray.config import Config
from gammaray.errors import ConfigError, Forbidden, Unauthorized

PREFIX = "gr-"  # so that scanners of public code can find a key that leaked
KEY_BYTES = 32
KEY = re.compile(rb"[!-~]{1,4096}")  # one word of a header
OPERATOR = "/gammaray/v1"
EVENTS = "/dashboard/events"
HOW_TO_OPERATE = "operator routes are closed: put a key's hash (`gammaray key`) into server.operator_keys"
Access = Literal["open", "tenant", "operator"]


@dataclass(frozen=True, slots=True)
class Identity:
    """`tenant` None: an operator, or somebody nobody asked. `key` is the name of the key, never the key."""

    tenant: str | None = None
    key: str | None = None


UNKNOWN = Identity()
WITHOUT_KEY = Identity("default")


def fresh_key() -> str:
    """A key of 256 random bits. Only its hash is configured, so nobody could check a weaker one."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def given_key(text: bytes) -> bytes:
    """A key that there is already, without the end of its line. Raises ConfigError without showing it."""
    key = text.strip()
    if not KEY.fullmatch(key):
        raise ConfigError("no key on standard input: expected one word of ASCII, of 4096 bytes at most")
    return key


def fingerprint(key: bytes) -> str:
    """What the configuration holds of a key. A plain hash is enough for a secret that nobody can guess."""
    return hashlib.sha256(key).hexdigest()


def access(path: str, protect_metrics: bool) -> Access:
    """Who may ask for `path`. Below the operator's prefix also what does not exist is closed.

    Of the live page only its events hold data; the rest is open, since a browser opens a page without a key.
    """
    private = (OPERATOR, "/metrics", EVENTS) if protect_metrics else (OPERATOR,)
    if any(path == root or path.startswith(f"{root}/") for root in private):
        return "operator"
    return "tenant" if path.startswith("/v1/") else "open"


class Keyring:
    """The configured keys. Every comparison takes the same time, whatever the key."""

    def __init__(self, config: Config) -> None:
        owned = [(key, name) for name, tenant in config.tenants.items() for key in tenant.api_keys]
        self._tenants = [(key, Identity(name, key.name)) for key, name in owned]
        self._operators = [(key, Identity(None, key.name)) for key in config.server.operator_keys]
        self._required = config.server.require_api_key
        self._protect_metrics = config.server.protect_metrics

    def admit(self, path: str, authorization: Sequence[bytes]) -> Identity:
        """Who asks for `path` with these Authorization headers. Raises Unauthorized or Forbidden.

        Without any tenant key in the configuration a header means nothing: clients must send one.
        """
        wanted = access(path, self._protect_metrics)
        if wanted == "operator":
            return self._operator(authorization)
        if wanted == "open":
            return UNKNOWN
        if not self._tenants or not (authorization or self._required):
            return WITHOUT_KEY
        identity = self._find(authorization)
        if identity.tenant is None:
            raise Forbidden("this is an operator key; use one of a tenant", code="wrong_key")
        return identity

    def _operator(self, authorization: Sequence[bytes]) -> Identity:
        if not self._operators:
            raise Forbidden(HOW_TO_OPERATE, code="no_operator_keys")
        identity = self._find(authorization)
        if identity.tenant is not None:
            raise Forbidden("this needs an operator key", code="wrong_key")
        return identity

    def _find(self, authorization: Sequence[bytes]) -> Identity:
        sent = fingerprint(_bearer(authorization))
        found = None
        for key, identity in (*self._tenants, *self._operators):
            if hmac.compare_digest(key.sha256, sent):
                found = identity
        if found is None:
            raise Unauthorized("nobody has this API key", code="invalid_api_key")
        return found


def _bearer(authorization: Sequence[bytes]) -> bytes:
    if not authorization:
        raise Unauthorized("an API key is needed: Authorization: Bearer KEY", code="missing_api_key")
    scheme, _, key = authorization[0].strip().partition(b" ")
    if len(authorization) > 1 or scheme.lower() != b"bearer" or not key:
        raise Unauthorized("send one header Authorization: Bearer KEY", code="malformed_api_key")
    return key
