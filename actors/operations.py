"""gammaray.api.operator.Operations, which this room may not import, over the controller actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle

from gammaray.actors.client import as_ours
from gammaray.actors.crew import NAMESPACE
from gammaray.actors.line import NAME
from gammaray.errors import GammarayError, NotFound, Overloaded, ReplicaLost

ANSWER_S = 10.0
PROFILE_S = 60.0  # for the steps to come
NO_CONTROLLER = (
    "the controller does not answer; requests go on under its last policy. Ask again when it is back, or set "
    "controller.enabled if it is off"
)
Json = dict[str, Any]
Target = tuple[str, str | None, str | None]  # tenant, class and drafter


class RayOperations:
    """Every call waits a while for a controller that starts again. See the protocol for what they do."""

    def __init__(self, targets: Sequence[DeploymentHandle[Any]] = (), answer_s: float = ANSWER_S) -> None:
        self._targets, self._answer_s = targets, answer_s

    async def overview(self, limit: int) -> Json:
        return await self._ask(lambda controller: controller.overview.remote(limit))

    async def tenants(self) -> Json:
        return await self._ask(lambda controller: controller.tenants.remote())

    async def tenant(self, name: str) -> Json:
        return await self._ask(lambda controller: controller.tenant.remote(name))

    async def put(self, name: str, settings: Mapping[str, Any]) -> Json:
        return await self._ask(lambda controller: controller.put.remote(name, settings))

    async def change(self, name: str, patch: Mapping[str, Any]) -> Json:
        return await self._ask(lambda controller: controller.change.remote(name, patch))

    async def remove(self, name: str) -> Json:
        return await self._ask(lambda controller: controller.remove.remote(name))

    async def rotate(self, name: str, sha256: str, key: str | None, grace_s: float) -> Json:
        return await self._ask(lambda controller: controller.rotate.remote(name, sha256, key, grace_s))

    async def pin_off(self, target: Target) -> Json:
        return await self._ask(lambda controller: controller.pin_off.remote(target))

    async def reset(self, target: Target) -> Json:
        return await self._ask(lambda controller: controller.reset.remote(target))

    async def unpin(self, target: Target) -> Json:
        return await self._ask(lambda controller: controller.unpin.remote(target))

    async def roll_back(self, name: str, what: str, request_class: str) -> Json:
        return await self._ask(lambda controller: controller.roll_back.remote(name, what, request_class))

    async def kill_switch(self, on: bool) -> Json:
        return await self._ask(lambda controller: controller.kill_switch.remote(on))

    async def split(self, name: str) -> Json:
        return await self._ask(lambda controller: controller.split.remote(name))

    async def usage(self, day: str | None) -> Json:
        return await self._ask(lambda controller: controller.usage.remote(day))

    async def policies(self) -> Json:
        return await self._ask(lambda controller: controller.policies.remote())

    async def audit(self, limit: int) -> Json:
        return await self._ask(lambda controller: controller.audit.remote(limit))

    async def histograms(self) -> Json:
        return await self._ask(lambda controller: controller.histograms.remote())

    async def topology(self) -> Json:
        return await self._ask(lambda controller: controller.topology.remote())

    async def profile(self, replica: int, steps: int) -> Json:
        if replica >= len(self._targets):
            raise NotFound(f"there is no replica {replica} (0 to {len(self._targets) - 1})", param="replica")
        try:
            file = await self._targets[replica].profile.remote(steps, PROFILE_S)
        except Exception as error:
            raise as_ours(error) from error
        return {"replica": replica, "steps": steps, "file": file}

    async def _ask(self, call: Callable[[Any], ray.ObjectRef[Json]]) -> Json:
        try:
            async with asyncio.timeout(self._answer_s):
                controller = await asyncio.to_thread(ray.get_actor, NAME, NAMESPACE)
                return await call(controller)
        except (ValueError, TimeoutError):  # no actor has the name, or it is silent
            raise Overloaded(NO_CONTROLLER, code="no_controller") from None
        except Exception as error:
            raise _told(error) from None


def _told(error: Exception) -> GammarayError:
    """A dead controller is no dead replica."""
    ours = as_ours(error)
    return Overloaded(NO_CONTROLLER, code="no_controller") if isinstance(ours, ReplicaLost) else ours
