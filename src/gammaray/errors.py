"""Every error that gammaray raises on purpose, in one tree.

    GammarayError
    ├── InvalidRequest        400  the request is wrong; `param` names the field
    │   ├── TooLarge          413  its body exceeds the limit
    │   └── Unprocessable     422  well-formed, but this checkpoint cannot take it (its chat template)
    ├── Unauthorized          401  no API key, or one that nobody has
    ├── Forbidden             403  a good key, but not for this
    ├── NotFound              404  no such model or route
    ├── TimedOut              408  the request's own time is over
    ├── Overloaded            503  no room now; try again after `retry_after` seconds
    │   ├── RateLimited       429  the tenant's limit is reached
    │   └── ReplicaLost            the replica is gone; the request may go on elsewhere
    ├── EngineFailure         500  one request failed inside the engine; the engine lives
    │   └── StateMismatch          the state oracle found state that speculation spoilt: a bug
    └── ConfigError                 bad configuration or checkpoint: stops a start-up
        ├── ModelUnsupported        the checkpoint cannot be served with paged attention
        └── VocabularyMismatch      drafter and target do not share one vocabulary

Errors cross process borders, so each keeps its arguments for pickling.
"""

from __future__ import annotations


class GammarayError(Exception):
    """Base of the tree. `status` is the HTTP status, `kind` the OpenAI error type."""

    status = 500
    kind = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.__dict__.copy())


class InvalidRequest(GammarayError):
    status = 400
    kind = "invalid_request_error"


class TooLarge(InvalidRequest):
    status = 413


class Unprocessable(InvalidRequest):
    status = 422


class Unauthorized(GammarayError):
    status = 401
    kind = "authentication_error"


class Forbidden(GammarayError):
    status = 403
    kind = "permission_error"


class NotFound(GammarayError):
    status = 404
    kind = "not_found_error"


class TimedOut(GammarayError):
    status = 408
    kind = "timeout_error"


class Overloaded(GammarayError):
    status = 503
    kind = "overloaded_error"

    def __init__(self, message: str, *, retry_after: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class RateLimited(Overloaded):
    status = 429
    kind = "rate_limit_error"


class ReplicaLost(Overloaded):
    pass


class EngineFailure(GammarayError):
    pass


class StateMismatch(EngineFailure):
    """State differs from its dense recomputation; `layer` is None for logits and lengths."""

    def __init__(self, what: str, rid: str, layer: int | None, position: int, error: float) -> None:
        where = f"layer {layer}, position {position}" if layer is not None else f"position {position}"
        super().__init__(f"{what} of {rid} is wrong from {where} on (relative error {error:.2g})")
        self.layer = layer
        self.position = position


class ConfigError(GammarayError):
    kind = "config_error"


class ModelUnsupported(ConfigError):
    pass


class VocabularyMismatch(ConfigError):
    def __init__(self, target_size: int, drafter_size: int, drafter: str) -> None:
        super().__init__(
            f"drafter {drafter!r} has a vocabulary of {drafter_size} tokens, the target of "
            f"{target_size}: they must be the same vocabulary"
        )


def _rebuild(cls: type[GammarayError], state: dict[str, object]) -> GammarayError:
    error = cls.__new__(cls)
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error
