"""Running engines in tests, and what a plain decode gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.engine import Engine
from gammaray.types import (
    FinishReason,
    GenerateRequest,
    Grammar,
    Logprobs,
    SpeculationStats,
    StepReport,
    TokenChunk,
)


@dataclass
class Outcome:
    """All chunks of one sequence, joined; joining checks that they neither overlap nor leave a gap."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    stats: SpeculationStats | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: tuple[Logprobs | None, ...] = ()

    def add(self, chunk: TokenChunk) -> None:
        assert self.finish is None, "a chunk after the last one"
        assert chunk.first_position == len(self.ids), "a gap or an overlap"
        self.ids += chunk.ids
        self.text += chunk.text
        assert not self.prompt_logprobs or not chunk.prompt_logprobs, "the prompt's log-probabilities twice"
        self.prompt_logprobs = chunk.prompt_logprobs or self.prompt_logprobs
        assert len(chunk.logprobs) in (0, len(chunk.ids)), "log-probabilities that are not those of the ids"
        self.logprobs += chunk.logprobs
        self.finish, self.stats = chunk.finish, chunk.stats


class Driver:
    """Steps an engine and collects what it delivers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        self.reports: list[StepReport] = []

    def submit(self, requests: Iterable[GenerateRequest]) -> None:
        for request in requests:
            self.engine.submit(request)

    def step(self) -> None:
        output = self.engine.step()
        self.reports.append(output.report)
        for chunk in output.chunks:
            self.outcomes.setdefault((chunk.request_id, chunk.sequence), Outcome()).add(chunk)

    def finish(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if self.engine.idle:
                return
            self.step()
        raise AssertionError(f"not finished after {limit} steps")


def run(engine: Engine, requests: Sequence[GenerateRequest]) -> dict[tuple[str, int], Outcome]:
    driver = Driver(engine)
    driver.submit(requests)
    driver.finish()
    return driver.outcomes


class Foresight:
    """Drafts the very tokens that plain decoding gives, so that whole blocks are accepted."""

    vocab_size: int | None = None

    def __init__(self, script: Sequence[int]) -> None:
        self.script = script

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views))

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        ahead = {view.rid: tuple(self.script[view.length :][: view.depth]) for view in ticket.views}
        return {r: DraftTree(t, tuple(range(-1, len(t) - 1))) for r, t in ahead.items() if t}

    def commit(self, rid: str, tokens: Sequence[int], features: torch.Tensor | None = None) -> None: ...

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None: ...

    def release(self, rid: str) -> None: ...

    def length(self, rid: str) -> int | None:
        return None


class Cycle:
    """A grammar of a few lines: the tokens of `word` again and again; EOS after each whole one."""

    def __init__(self, word: Sequence[int], vocab: int, eos: int) -> None:
        self.word, self.vocab, self.eos = tuple(word), vocab, eos
        self.state = 0
        self.finished = False

    def allowed(self) -> list[int]:
        ends = [self.eos] if self.state and self.state % len(self.word) == 0 else []
        return [] if self.finished else [self.word[self.state % len(self.word)], *ends]

    def mask(self) -> Tensor:
        mask = torch.zeros(self.vocab, dtype=torch.bool)
        mask[self.allowed()] = True
        return mask

    def advance(self, token: int) -> bool:
        if token not in self.allowed():
            return False
        self.state, self.finished = self.state + 1, token == self.eos
        return True

    def rollback(self, count: int) -> None:
        self.state -= count
        self.finished = self.finished and not count

    def copy(self) -> Cycle:
        other = Cycle(self.word, self.vocab, self.eos)
        other.state, other.finished = self.state, self.finished
        return other


class Cycles:
    """Speaks GrammarCompiler: the text of a grammar names the tokens of its word by their digits."""

    def __init__(self, vocab: int, eos: int) -> None:
        self.vocab, self.eos = vocab, eos

    def compile(self, grammar: Grammar) -> Cycle:
        return Cycle([int(digit) for digit in grammar.text], self.vocab, self.eos)
