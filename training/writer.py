"""The target as an author: many texts at once through our own engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gammaray.engine.build import TokenizerDecoder, eos_ids
from gammaray.engine.engine import TOKEN_BUDGET, Engine, EngineOptions
from gammaray.engine.recording import record_passes
from gammaray.engine.runner import ModelRunner
from gammaray.errors import EngineFailure
from gammaray.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]
CPU_BATCH, GPU_BATCH = 64, 256  # sequences at once; more of them are no faster
ROOM = 512  # tokens of KV for each, so that few are ever preempted
FED_AT_ONCE = 4  # tokens a step for each sequence, so that prompts do not hold up those that decode


@dataclass(slots=True)
class Written:
    ids: list[int] = field(default_factory=list)  # with the token that ended it
    text: str = ""


class Writer:
    """Each call has an engine of its own, so what comes out depends on what it is given alone."""

    def __init__(self, runner: ModelRunner, tokenizer: PreTrainedTokenizerBase, max_batch: int = 0) -> None:
        """`max_batch` 0: as many as suit the device and have room in its KV pool."""
        self.runner, self.tokenizer = runner, tokenizer
        suits = CPU_BATCH if runner.device.type == "cpu" else GPU_BATCH
        fits = max(1, runner.num_blocks * runner.block_size // ROOM)
        self._max_batch = max_batch or min(suits, fits)
        self._budget = max(TOKEN_BUDGET, FED_AT_ONCE * self._max_batch)
        record_passes(runner, self._max_batch, self._budget)

    def write(self, requests: Mapping[int, tuple[Ids, SamplingParams]]) -> dict[int, Written]:
        """By number, what follows each prompt. Raises InvalidRequest, EngineFailure."""
        engine, found = self._engine(len(requests)), {number: Written() for number in requests}
        for number, (prompt, sampling) in requests.items():
            engine.submit(GenerateRequest(str(number), prompt, sampling))
        while not engine.idle:
            for chunk in engine.step().chunks:
                if chunk.finish == "error":
                    raise EngineFailure(chunk.error or "the engine failed while it wrote")
                found[int(chunk.request_id)].ids += chunk.ids
                found[int(chunk.request_id)].text += chunk.text
        return found

    @property
    def longest(self) -> int:
        """Tokens of prompt and text together."""
        return min(self.runner.max_model_len, self.runner.num_blocks * self.runner.block_size)

    def _engine(self, requests: int) -> Engine:
        options = EngineOptions(
            max_batch=self._max_batch, token_budget=self._budget, max_waiting=max(1, requests)
        )
        end = eos_ids(self.runner, self.tokenizer)
        return Engine(self.runner, TokenizerDecoder(self.tokenizer), end, options=options)
