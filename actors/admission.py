"""Which drafters may answer requests: asked where their files are, before the engine is built."""

from __future__ import annotations

from gammaray import papers
from gammaray.config import Config
from gammaray.engine import identity
from gammaray.engine.drafters import provenance
from gammaray.routing import registry
from gammaray.routing.registry import Version


def admit(config: Config) -> None:
    """Raises ConfigError for a drafter of the configuration that has no acceptance report and should have
    one, or whose report is void: whatever a tenant, a trial or a request may name later is among these."""
    model = config.target.model
    for name, own in config.drafters.items():
        place = provenance.folder(own)
        found = papers.read(place) if place is not None else None
        if found is not None:
            version = Version(name, own.version, own.method)
            registry.admit(version, found, identity.of(model), str(place), model)
