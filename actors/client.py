"""The EngineClient of the HTTP side, over a Serve deployment handle."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, cast

from grpc import StatusCode
from grpc.aio import AioRpcError
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from gammaray.errors import EngineFailure, GammarayError, Overloaded, ReplicaLost
from gammaray.types import GenerateRequest, Health, ModelInfo, TokenChunk

# Of a gRPC stream whose other end went away. Errors of the replica's own code come as Python exceptions.
CUT = (StatusCode.UNAVAILABLE, StatusCode.CANCELLED, StatusCode.INTERNAL, StatusCode.UNKNOWN)


class RayEngineClient:
    """One hop in, one stream out. Closing a stream cancels the call, which aborts it in the engine."""

    def __init__(self, target: DeploymentHandle[Any]) -> None:
        self._target = target
        self._streaming = target.options(stream=True)

    async def info(self) -> ModelInfo:
        try:
            info: ModelInfo = await self._target.info.remote()
        except Exception as error:
            raise as_ours(error) from error
        return info

    async def health(self) -> Health:
        try:
            health: Health = await self._target.health.remote()
        except Exception as error:
            raise as_ours(error) from error
        return health

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        call = self._streaming.generate.remote(request)
        response = cast(DeploymentResponseGenerator[TokenChunk], call)
        try:
            async for chunk in response:
                yield chunk
        except Exception as error:
            raise as_ours(error) from error
        finally:
            response.cancel()  # nothing happens when the stream has ended


def as_ours(error: Exception) -> GammarayError:
    """What an error of Ray's means to a client. Ours cross Ray as the cause of a task error."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, GammarayError):
        return cause
    if isinstance(error, GammarayError):
        return error
    if isinstance(error, BackPressureError):
        return Overloaded("too many requests are waiting; try again", retry_after=error.retry_after_s or 1.0)
    if isinstance(error, RayActorError | DeploymentUnavailableError) or _cut(error):
        return ReplicaLost("the model's replica is gone and comes back; try again", retry_after=5.0)
    if isinstance(error, RayError | RayServeException):
        return EngineFailure(f"the call to the model failed: {type(error).__name__}")
    return EngineFailure(f"the model's replica failed: {type(error).__name__}")


def _cut(error: Exception) -> bool:
    return isinstance(error, AioRpcError) and error.code() in CUT
