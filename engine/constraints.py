"""What one sequence's tokens so far do to the logits of its next one, before temperature.

Order, as the field has it: grammar, bad words, logit bias, min_tokens, repetition, frequency and presence
penalty. At a node of a draft tree the path to it counts as output, so a token sees the same constraints
whether a round accepts one token or many.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from gammaray.engine.grammar import Matcher
from gammaray.errors import EngineFailure
from gammaray.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Listed:
    """The E tokens whose logits penalties or bias may change."""

    tokens: Tensor  # [E] int64
    bias: Tensor  # [E] float32
    counts: Tensor  # [E] float32, in the output
    seen: Tensor  # [E] bool, in the prompt or the output


class Constraints:
    """Of one sequence. `advance` takes committed tokens; `apply` looks further along a draft's path.

    `listed`, `banned` and `masks` say the same of a whole draft tree, for kernels.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: Sequence[int],
        ends: Collection[int],
        vocab_size: int,
        matcher: Matcher | None = None,
    ) -> None:
        """`ends`: tokens that end this sequence, which min_tokens holds back."""
        self.matcher = matcher
        self._sampling = sampling
        self._ends = sorted(ends)
        self._output: list[int] = []
        self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
        self._in_prompt[list(prompt)] = True
        self._counts = torch.zeros(vocab_size)  # of each token in the output
        self._biased = torch.tensor([token for token, _ in sampling.logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([bias for _, bias in sampling.logit_bias])

    def advance(self, token: int) -> None:
        self._output.append(token)
        self._counts[token] += 1
        if self.matcher is not None and not self.matcher.advance(token):
            raise EngineFailure("a token that the grammar forbids")

    def apply(self, logits: Tensor, path: Sequence[int] = ()) -> None:
        """Change raw logits [V], in place, of the token behind output and path. All -inf: none is left.

        Raises EngineFailure when the grammar cannot be followed any further.
        """
        self._mask(logits, path)
        for word in self._sampling.bad_words:
            if self._ends_with(word[:-1], path):
                logits[word[-1]] = -math.inf
        if len(self._biased):
            logits.index_add_(0, self._biased.to(logits.device), self._bias.to(logits.device))
        if self._early(path):
            self._hold_back_ends(logits)
        self._penalise(logits, path)

    def listed(self, drafted: Sequence[int]) -> Listed:
        """Tokens that penalties or bias touch at some node of a tree with the tokens `drafted`."""
        touched = torch.zeros_like(self._in_prompt)
        if _penalises(self._sampling):
            touched |= self._seen()
            touched[list(drafted)] = True
        touched[self._biased] = True
        tokens = touched.nonzero()[:, 0]
        bias = torch.zeros(len(tokens)).index_add_(0, torch.searchsorted(tokens, self._biased), self._bias)
        return Listed(tokens, bias, self._counts[tokens], self._seen()[tokens])

    def banned(self, path: Sequence[int]) -> list[int]:
        """Tokens that bad words forbid behind a path; ~token for those that min_tokens holds back."""
        words = self._sampling.bad_words
        banned = {word[-1] for word in words if self._ends_with(word[:-1], path)}
        held = [~end for end in self._ends if end not in banned] if self._early(path) else []
        return [*sorted(banned), *held]

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> list[Tensor | None]:
        """What the grammar allows behind the root and each node of a tree: [V] bool; None: everything.

        Once the grammar cannot be followed any further nothing is allowed, as `verify` has it for a row.
        """
        matcher = self.matcher
        if matcher is None:
            return [None] * (len(tokens) + 1)
        nothing = torch.zeros_like(self._in_prompt)
        found: list[Tensor | None] = [nothing] * (len(tokens) + 1)

        def visit(row: int) -> None:
            found[row] = None if matcher.finished else matcher.mask()
            for child in [node for node, parent in enumerate(parents) if parent == row - 1]:
                taken = matcher.advance(tokens[child])
                try:
                    visit(child + 1)
                finally:
                    matcher.rollback(int(taken))

        with suppress(EngineFailure):  # of this request's grammar
            visit(0)
        return found

    def _mask(self, logits: Tensor, path: Sequence[int]) -> None:
        if self.matcher is None:
            return
        advanced = 0
        try:
            for token in path:
                advanced += self.matcher.advance(token)
            if not self.matcher.finished:
                logits.masked_fill_(~self.matcher.mask().to(logits.device), -math.inf)
        finally:
            self.matcher.rollback(advanced)

    def _ends_with(self, tokens: Sequence[int], path: Sequence[int]) -> bool:
        """Whether output and path end with these tokens."""
        count = len(tokens)
        tail = [*self._output[-count:], *path][-count:] if count else []
        return tail == list(tokens)

    def _early(self, path: Sequence[int]) -> bool:
        """Whether min_tokens still holds back the ends."""
        return len(self._output) + len(path) < self._sampling.min_tokens

    def _seen(self) -> Tensor:
        return self._in_prompt | (self._counts > 0)  # [V] bool

    def _hold_back_ends(self, logits: Tensor) -> None:
        """A text that its grammar leaves nothing but the end may end early."""
        before = logits[self._ends]
        logits[self._ends] = -math.inf
        if not bool((logits > -math.inf).any()):
            logits[self._ends] = before

    def _penalise(self, logits: Tensor, path: Sequence[int]) -> None:
        """Repetition: Keskar et al., arXiv 1909.05858, section 4.1. The other two as OpenAI defines them."""
        sampling = self._sampling
        if not _penalises(sampling):
            return
        counts = self._counts.to(logits.device)
        if path:
            counts = counts.index_add(0, *_ones(path, logits.device))
        seen = self._in_prompt.to(logits.device) | (counts > 0)
        repetition = sampling.repetition_penalty
        factor = torch.where(logits > 0, 1 / repetition, repetition)
        logits.mul_(factor.masked_fill_(~seen, 1.0))
        logits.sub_(counts * sampling.frequency_penalty + (counts > 0) * sampling.presence_penalty)


def _ones(path: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(path, device=device), torch.ones(len(path), device=device)


def _penalises(sampling: SamplingParams) -> bool:
    return (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (1, 0, 0)


def constraints(
    sampling: SamplingParams,
    prompt: Sequence[int],
    ends: Collection[int],
    vocab_size: int,
    matcher: Matcher | None,
) -> Constraints | None:
    """None where every token is free, so that the common request pays nothing."""
    bound = sampling.bad_words or sampling.logit_bias or sampling.min_tokens or _penalises(sampling)
    return Constraints(sampling, prompt, ends, vocab_size, matcher) if bound or matcher is not None else None
