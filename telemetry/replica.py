"""All that a target replica tells of itself: metrics, and spans of the requests that are traced."""

from __future__ import annotations

from pathlib import Path

from opentelemetry import trace

from gammaray.config import Config
from gammaray.telemetry.labels import Labels
from gammaray.telemetry.meters import open_meters
from gammaray.telemetry.recorder import Recorder
from gammaray.telemetry.spans import StepSpans
from gammaray.telemetry.vllm import VllmNames
from gammaray.types import PolicySnapshot, StepReport


class ReplicaTelemetry:
    """A listener of the engine: one thread calls `record`."""

    def __init__(self, config: Config, instance: str, directory: Path | None) -> None:
        """`instance`: which replica of its node; `directory`: see sockets.folder, None: nobody gathers."""
        told, model = config.telemetry, config.target.model
        regions = {name: tenant.region for name, tenant in config.tenants.items()}
        self.meters = open_meters(config, instance, directory)
        self._recorder = Recorder(self.meters, Labels(told.tenants, regions), model)
        self._vllm = VllmNames(self.meters, model) if told.vllm_names else None
        self._spans = StepSpans(trace.get_tracer("gammaray"))  # Serve's provider, if it traces

    def apply(self, policy: PolicySnapshot) -> None:
        self._recorder.apply(policy)

    def record(self, report: StepReport) -> None:
        self._recorder.record(report)
        if self._vllm is not None:
            self._vllm.record(report)
        self._spans.record(report)

    def close(self) -> None:
        self.meters.close()
