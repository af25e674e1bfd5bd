"""Exact histograms of the sequences that ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from gammaray.telemetry import names
from gammaray.telemetry.labels import KeyLabels
from gammaray.telemetry.meters import Meters
from gammaray.telemetry.names import Metric
from gammaray.types import Finished

PENDING = 1000  # sequences that wait for the next collection, at most

Attributes = dict[str, str]


class Requests:
    """Sequences wait until metrics are collected, or until they are too many."""

    def __init__(self, meters: Meters, model: str) -> None:
        self._common = {names.OPERATION: "text_completion", names.PROVIDER: "gammaray", names.MODEL: model}
        self._histograms = {metric: meters.histogram(metric) for metric in names.REQUEST}
        self._pending: deque[tuple[KeyLabels, Finished]] = deque()
        meters.before_collecting(self.flush)

    def add(self, labels: KeyLabels, ended: Finished) -> None:
        self._pending.append((labels, ended))
        if len(self._pending) > PENDING:
            self._flush_one()  # all of them would hold up the engine

    def flush(self) -> None:
        """From any thread."""
        while self._flush_one():
            pass

    def _flush_one(self) -> bool:
        try:
            labels, ended = self._pending.popleft()
        except IndexError:  # another thread may have been faster
            return False
        key = dict(zip(names.KEY, labels, strict=True))
        for metric, value, more in values(ended):
            common = self._common if metric.name.startswith("gen_ai.") else {}
            self._histograms[metric].record(value, key | common | more)
        return True


def values(ended: Finished) -> Iterator[tuple[Metric, float, Attributes]]:
    """What one sequence gives to which histogram, with attributes beside its key's."""
    yield names.DURATION, ended.total_s, {}
    yield names.QUEUED, ended.queued_s, {}
    if ended.index == 0:  # the others of its request share the prompt
        yield names.TOKENS, ended.prompt_tokens, {names.TOKEN_TYPE: "input"}
    yield names.TOKENS, ended.output_tokens, {names.TOKEN_TYPE: "output"}
    if ended.output_tokens:
        yield names.TTFT, ended.first_s, {}
    if ended.per_token_s is not None:
        yield names.TPOT, ended.per_token_s, {}
    if ended.alpha is not None:
        yield names.ALPHA, ended.alpha, {}
    if ended.stats.tau is not None and ended.stats.drafted:
        yield names.TAU, ended.stats.tau, {}
    if ended.quality is not None:
        yield names.KL, ended.quality.kl, {}
        yield names.PERPLEXITY, ended.quality.perplexity, {}
