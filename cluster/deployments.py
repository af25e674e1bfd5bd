"""What Serve was told to deploy, as its controller knows it, and how to change one replica's place in it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import ray
from ray.exceptions import ActorDiedError
from ray.serve.schema import DeploymentSchema, ServeDeploySchema

Json = dict[str, Any]


def applications() -> dict[str, Any]:
    """Of each application of Serve its declaration, None if it was not declared. Empty without Serve.

    Raises whatever Ray does while Serve's controller is down.
    """
    client = _client()
    if client is None:
        return {}
    try:
        told = ray.get(client._controller.get_app_configs.remote())
        return {name: told.get(name) for name in client.get_serve_details()["applications"]}
    except ActorDiedError:  # for good, by `serve shutdown`: without this Serve's client asks it for ever
        _context()._disconnect()
        raise


def overridden(application: Any) -> list[Json]:
    """The deployments that a declaration says something about."""
    return [deployment.model_dump(exclude_unset=True) for deployment in application.deployments]


def override(name: str, deployments: Sequence[Json]) -> None:
    """Serve restarts what changes by this, and nothing else: the version of the code stays the same."""
    client = _client()
    every = applications()
    declared = {app: told for app, told in every.items() if told is not None}
    parts = [DeploymentSchema(**deployment) for deployment in deployments]
    declared[name] = declared[name].model_copy(update={"deployments": parts})
    capacity = client.get_serve_details().get("target_capacity")
    client.deploy_apps(ServeDeploySchema(applications=[*declared.values()], target_capacity=capacity))


def _client() -> Any:
    """None when Serve is not there. Serve's public functions tell no declarations."""
    return _context()._get_global_client(raise_if_no_controller_running=False)


def _context() -> Any:
    return import_module("ray.serve.context")
