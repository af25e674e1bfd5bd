"""API keys that lie in files, one a file, as Kubernetes shows a Secret."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gammaray.api.auth import fingerprint
from gammaray.errors import ConfigError

Tree = Mapping[str, Any]


def with_keys(config: Tree, folder: Path) -> dict[str, Any]:
    """A plain configuration and the keys of a folder: `tenants/TENANT/NAME` and `operator/NAME`.

    Raises ConfigError for keys of a tenant that there is not, and for a file that holds no key.
    """
    if not folder.is_dir():
        raise ConfigError(f"keys: there is no folder {str(folder)!r}; is the Secret mounted?")
    tenants = {"default": {}, **(config.get("tenants") or {})}
    for found in _entries(folder / "tenants"):
        if found.name not in tenants:
            raise ConfigError(f"keys: {str(found)!r} is of a tenant that the configuration does not have")
        tenants[found.name] = _added(tenants[found.name] or {}, "api_keys", found)
    server = _added(config.get("server") or {}, "operator_keys", folder / "operator")
    return {**config, "tenants": tenants, "server": server}


def _added(tree: Tree, name: str, folder: Path) -> dict[str, Any]:
    more = [{"name": file.name, "sha256": fingerprint(_key(file))} for file in _entries(folder)]
    return {**tree, name: [*(tree.get(name) or []), *more]}


def _entries(folder: Path) -> list[Path]:
    """By name. Kubernetes keeps the versions of a Secret beside its files, in names with dots before them."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".."))


def _key(file: Path) -> bytes:
    key = file.read_bytes().strip()
    if not key:
        raise ConfigError(f"keys: {str(file)!r} is empty")
    return key
