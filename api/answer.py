"""What has been generated for one HTTP request: texts, log-probabilities, usage and speculation counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from gammaray.api import logprobs
from gammaray.api.job import Job
from gammaray.api.logprobs import Entry
from gammaray.api.tokens import TextPosition
from gammaray.types import NO_STATS, Logprobs, SpeculationStats, TokenChunk


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a choice, or all of it. `entries`: one for each of its tokens; None: nobody asked."""

    text: str
    finish: str | None
    entries: tuple[Entry, ...] | None


def joined(pieces: Sequence[Piece]) -> Piece:
    entries = [piece.entries for piece in pieces if piece.entries is not None]
    return Piece(
        "".join(piece.text for piece in pieces),
        pieces[-1].finish,
        tuple(chain.from_iterable(entries)) if entries else None,
    )


@dataclass(slots=True)
class Choice:
    """One sequence so far. `position`: where the text of its next token begins."""

    position: TextPosition
    pieces: list[Piece] = field(default_factory=list)
    tokens: int = 0
    finish: str | None = None
    stats: SpeculationStats = NO_STATS
    cached: int = 0  # prompt tokens

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def add(self, piece: Piece, chunk: TokenChunk) -> None:
        self.pieces.append(piece)
        self.tokens += len(chunk.ids)
        if chunk.finish is not None:
            self.finish, self.cached = chunk.finish, chunk.cached_tokens
            self.stats = chunk.stats or self.stats


class Answer:
    """Sums the chunks of all choices of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        texts = job.inputs.texts or ("",) * len(job.requests)
        self.choices = [Choice(TextPosition(len(text))) for text in texts for _ in range(job.n)]
        self._echoes: dict[int, Piece] = {}  # by prompt

    def add(self, index: int, chunk: TokenChunk) -> Piece:
        """What this chunk adds to its choice: with the first, also the prompt, if it is echoed."""
        choice = self.choices[index]
        if self.job.prompt_only:
            chunk = _without_output(chunk)
        piece = Piece(chunk.text, chunk.finish, self._entries(choice, chunk))
        if self.job.inputs.texts and not choice.pieces:
            piece = joined([self._echo(index // self.job.n, chunk.prompt_logprobs), piece])
        choice.add(piece, chunk)
        return piece

    def _entries(self, choice: Choice, chunk: TokenChunk) -> tuple[Entry, ...] | None:
        if not self.job.has_logprobs:
            return None
        return logprobs.generated(chunk.ids, chunk.logprobs, choice.position, self.job.inputs.vocabulary)

    def _echo(self, prompt: int, found: tuple[Logprobs | None, ...]) -> Piece:
        """The prompt; its log-probabilities come once, with the very first chunk."""
        if prompt not in self._echoes:
            inputs = self.job.inputs
            text, ids = inputs.texts[prompt], inputs.prompts[prompt]
            has = self.job.has_logprobs
            entries = logprobs.of_prompt(ids, found, text, inputs.vocabulary) if has else None
            self._echoes[prompt] = Piece(text, None, entries)
        return self._echoes[prompt]

    @property
    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage. A prompt counts once, however many choices share it."""
        prompt = sum(len(request.prompt) for request in self.job.requests)
        completion = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached()},
        }

    def _cached(self) -> int:
        """The first choice of each prompt tells: later ones may find what the first one computed."""
        return sum(choice.cached for choice in self.choices[:: self.job.n])

    def metrics(self) -> dict[str, Any]:
        """The `metrics` extension: counts of all choices together, and the plan they ran under."""
        plan, stats = self.job.plan, sum((choice.stats for choice in self.choices), NO_STATS)
        speculation = {
            "state": plan.state if plan.drafter is not None or plan.state != "on" else "off",
            "drafter": plan.drafter,
            "gamma": plan.gamma,
            "width": plan.width,
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "tau": stats.tau,
            "alpha": stats.acceptance,  # of all rounds: of one answer few are verified whole
            "histogram": list(stats.lengths),  # [k]: rounds that emitted k tokens
            **_as_vllm(stats),
            "notes": list(self.job.notes),
        }
        return {"speculative_decoding": speculation}


def _as_vllm(stats: SpeculationStats) -> dict[str, Any]:
    """The same counts under the names of vLLM, which benchmark tools read; none without a draft."""
    if not stats.rounds or not stats.drafted:
        return {}
    accepted = stats.emitted - stats.rounds  # one token of each round is the target's own
    return {
        "num_spec_steps": stats.rounds,
        "num_draft_tokens": stats.drafted,
        "num_accepted_draft_tokens": accepted,
        "mean_acceptance_length": stats.tau,
        "draft_acceptance_rate": accepted / stats.drafted,
        "acceptance_histogram": list(stats.lengths[1:]),  # [k]: rounds that accepted k drafted tokens
    }


def _without_output(chunk: TokenChunk) -> TokenChunk:
    """Leaves out the token that the engine had to generate, though none was asked for."""
    finish = chunk.finish and "length"
    return replace(chunk, ids=(), text="", logprobs=(), stats=None, finish=finish)
