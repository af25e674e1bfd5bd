"""API keys that lie in files, one a file, as Kubernetes shows a Secret."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gammaray.api.auth import KEY, fingerprint
from gammaray.errors import ConfigError
from gammaray.yamlfile import mapping

Json = dict[str, Any]


def with_keys(config: Mapping[str, Any], folder: Path) -> Json:
    """A plain configuration and the keys of a folder: `tenants/TENANT/NAME` and `operator/NAME`.

    Raises ConfigError for keys of a tenant that there is not, for a file that holds no key, and for a folder
    without any: without keys everybody would be served.
    """
    if not folder.is_dir():
        raise ConfigError(f"keys: there is no folder {str(folder)!r}; is the Secret mounted?")
    known = [path.name for path in _entries(folder) if path.name in ("tenants", "operator")]
    if not known:
        raise ConfigError(f"keys: {str(folder)!r} has neither 'tenants' nor 'operator'")
    tenants = {"default": {}, **mapping(config.get("tenants") or {}, "config: tenants")}
    for found in _entries(folder / "tenants") if "tenants" in known else []:
        if found.name not in tenants:
            raise ConfigError(f"keys: {str(found)!r} is of a tenant that the configuration does not have")
        where = f"config: tenants.{found.name}"
        tenants[found.name] = added(tenants[found.name], where, "api_keys", _keys(found))
    keyed = {**config, "tenants": tenants}
    if "operator" in known:
        keys = _keys(folder / "operator")
        keyed["server"] = added(config.get("server"), "config: server", "operator_keys", keys)
    return keyed


def added(tree: object, where: str, name: str, keys: Sequence[Json]) -> Json:
    """`tree`, and more keys in its list `name`. Raises ConfigError that names `where`."""
    known = mapping({} if tree is None else tree, where)
    listed = known.get(name) or []
    if not isinstance(listed, list):
        raise ConfigError(f"{where}.{name}: expected a list")
    return {**known, name: [*listed, *keys]}


def _keys(folder: Path) -> list[Json]:
    return [{"name": file.name, "sha256": fingerprint(_key(file))} for file in _entries(folder)]


def _entries(folder: Path) -> list[Path]:
    """By name. Kubernetes keeps the versions of a Secret beside its files, in names with dots before them."""
    try:
        found = sorted(path for path in folder.iterdir() if not path.name.startswith(".."))
    except OSError as error:
        raise ConfigError(f"keys: {str(folder)!r} cannot be read: {error.strerror}") from None
    if not found:
        raise ConfigError(f"keys: {str(folder)!r} is empty; is its Secret?")
    return found


def _key(file: Path) -> bytes:
    try:
        key = file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"keys: {str(file)!r} cannot be read: {error.strerror}") from None
    if not key:
        raise ConfigError(f"keys: {str(file)!r} is empty")
    if not KEY.fullmatch(key):
        raise ConfigError(
            f"keys: {str(file)!r} holds no key: expected one word of ASCII, of 4096 bytes at most"
        )
    return key
