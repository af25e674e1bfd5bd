"""A request becomes sequences."""

from __future__ import annotations

from collections.abc import Collection

from gammaray.engine.constraints import constraints
from gammaray.engine.grammar import Matcher
from gammaray.engine.kv import BlockTable
from gammaray.engine.sequence import Sequence
from gammaray.engine.text import OutputText, TextDecoder
from gammaray.types import FinishReason, GenerateRequest


class Intake:
    """For one model: `eos` ends its texts."""

    def __init__(self, decoder: TextDecoder, eos: Collection[int], vocab_size: int) -> None:
        self._decoder, self._eos, self._vocab_size = decoder, frozenset(eos), vocab_size

    def begin(
        self, request: GenerateRequest, matcher: Matcher | None
    ) -> list[tuple[Sequence, FinishReason | None]]:
        """The sequences, each behind what the client has of it already, and whether that is all there is
        to say."""
        sequences = [self._sequence(request, index, matcher) for index in range(request.n)]
        for sequence in sequences[1:]:
            sequence.leader = sequences[0]
        have = request.generated or ((),) * request.n
        finishes = [sequence.keep(ids)[1] for sequence, ids in zip(sequences, have, strict=True)]
        for sequence in sequences:
            sequence.delivered = sequence.output.skip()
        return list(zip(sequences, finishes, strict=True))

    def _sequence(self, request: GenerateRequest, index: int, matcher: Matcher | None) -> Sequence:
        sampling = request.sampling
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos)
        own = matcher.copy() if matcher else None
        return Sequence(
            request=request,
            index=index,
            tokens=list(request.prompt),
            output=OutputText(self._decoder, sampling.stop, request.prompt, sampling.min_tokens),
            table=BlockTable(salt=request.tenant.encode()),
            ends=ends,
            constraints=constraints(sampling, request.prompt, ends, self._vocab_size, own),
            prompt_logprobs=None if sampling.prompt_logprobs is None or index else [None],
        )
