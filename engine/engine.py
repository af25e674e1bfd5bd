"""The decode loop of one replica. Engine.step() is the only place where request state changes.

    schedule -> draft -> verify -> accept -> commit

for the whole batch at once. Submissions, aborts and policies may come from any thread; they queue up
and are applied at the start of a step.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from gammaray.engine.admission import check_request
from gammaray.engine.batch import Row
from gammaray.engine.drafters.base import Drafter, DraftTree
from gammaray.engine.drafting import draft
from gammaray.engine.kv import BlockTable, KVCache
from gammaray.engine.oracle import Oracle
from gammaray.engine.runner import ModelRunner
from gammaray.engine.scheduler import Schedule, Scheduler, Slice
from gammaray.engine.sequence import Key, Sequence, round_stats
from gammaray.engine.text import OutputText, TextDecoder
from gammaray.engine.verifier import Verdict, VerifyJob, verify
from gammaray.errors import ConfigError
from gammaray.types import (
    FinishReason,
    GenerateRequest,
    KeyCounts,
    ModelInfo,
    PolicySnapshot,
    SpeculationStats,
    StepReport,
    TokenChunk,
)

TOKEN_BUDGET = 256  # large enough to feed the cores, small enough that a prompt chunk delays decoding little


@dataclass(frozen=True, slots=True)
class EngineOptions:
    name: str = "model"  # what clients call it
    max_batch: int = 64  # running sequences
    token_budget: int = TOKEN_BUDGET  # tokens the target is fed in a step
    prefix_cache: bool = True
    draft_deadline_s: float = 0.1  # a draft that is later than this is lost
    oracle: bool = False  # recompute one sequence a step densely and compare


@dataclass(frozen=True, slots=True)
class StepOutput:
    chunks: list[TokenChunk]
    report: StepReport


class Engine:
    def __init__(
        self,
        runner: ModelRunner,
        decoder: TextDecoder,
        eos: Collection[int] = (),
        drafters: Mapping[str, Drafter] | None = None,
        options: EngineOptions = EngineOptions(),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if options.token_budget < options.max_batch:
            raise ConfigError(
                f"token_budget {options.token_budget} is below max_batch {options.max_batch}: every sequence "
                "that decodes takes a token a step"
            )
        self.runner = runner
        self.drafters = dict(drafters or {})
        self.cache = KVCache(runner.num_blocks, runner.block_size, options.prefix_cache)
        self.scheduler = Scheduler(self.cache, options.max_batch, options.token_budget)
        self.options = options
        self.policy = PolicySnapshot()
        self.steps = 0
        self._decoder = decoder
        self._eos = frozenset(eos)
        self._clock = clock
        self._inbox: deque[Callable[[], list[TokenChunk]]] = deque()
        self._oracle = Oracle(runner, self.cache, self.drafters) if options.oracle else None

    # From any thread ---------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request. Raises InvalidRequest when it can never run."""
        check_request(request, self.info)
        self._inbox.append(partial(self._add, request))

    def abort(self, request_id: str) -> None:
        """Stop every sequence of a request at the next step; unknown ids are ignored."""
        self._inbox.append(partial(self._finish_all, request_id, "abort"))

    def apply(self, policy: PolicySnapshot) -> None:
        """Use this policy from the next step on."""
        self._inbox.append(partial(self._set_policy, policy))

    @property
    def idle(self) -> bool:
        """Nothing to do until somebody submits."""
        return not self._inbox and not self.scheduler.running and not self.scheduler.waiting

    # The loop ----------------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        chunks = [chunk for event in self._drain() for chunk in event()]
        marks = [self._clock()]
        schedule = self.scheduler.schedule(self.policy)
        for sequence in schedule.preempted:
            self._release_draft(sequence)
        marks.append(self._clock())
        deadline = marks[-1] + self.options.draft_deadline_s
        trees = draft(schedule.slices, self.drafters, self.runner.vocab_size, deadline)
        marks.append(self._clock())
        rows = [self._row(part, trees.get(part.sequence.rid)) for part in schedule.slices]
        logits = self.runner.forward(rows) if rows else None  # [N, V]
        ends = [part for part in schedule.slices if part.pending == part.sequence.pending]
        verdicts = self._verify(logits, ends, trees)
        marks.append(self._clock())
        counts: dict[Key, SpeculationStats] = defaultdict(SpeculationStats)
        chunks += self._commit(schedule.slices, verdicts, trees, counts)
        if self._oracle and logits is not None:
            self._oracle.check([part.sequence for part in ends], verdicts, logits, trees)
        marks.append(self._clock())
        self.steps += 1
        return StepOutput(chunks, self._report(schedule, trees, counts, marks))

    def fail_all(self, message: str) -> list[TokenChunk]:
        """After a step raised: end every sequence with an error and give all its resources back."""
        chunks = [chunk for event in self._drain() for chunk in event()]
        sequences = list(self.scheduler)
        return chunks + [self._finish(sequence, "error", message) for sequence in sequences]

    def _drain(self) -> Iterable[Callable[[], list[TokenChunk]]]:
        while self._inbox:
            yield self._inbox.popleft()

    def _row(self, part: Slice, tree: DraftTree | None) -> Row:
        sequence, start = part.sequence, part.sequence.table.computed
        return Row(
            pending=sequence.tokens[start : start + part.pending],
            start=start,
            blocks=sequence.table.blocks,
            tree_tokens=tree.tokens if tree else (),
            tree_parents=tree.parents if tree else (),
            logits=part.pending == sequence.pending,
        )

    def _verify(
        self, logits: torch.Tensor | None, ends: list[Slice], trees: Mapping[str, DraftTree]
    ) -> dict[str, Verdict]:
        jobs = [
            VerifyJob(
                tree=trees.get(part.sequence.rid),
                sampling=part.sequence.request.sampling,
                sequence=part.sequence.index,
                position=len(part.sequence.tokens),
                verification=part.sequence.request.plan.verification,
            )
            for part in ends
        ]
        verdicts = verify(logits, jobs) if jobs and logits is not None else []
        return {part.sequence.rid: verdict for part, verdict in zip(ends, verdicts, strict=True)}

    def _commit(
        self,
        slices: list[Slice],
        verdicts: Mapping[str, Verdict],
        trees: Mapping[str, DraftTree],
        counts: dict[Key, SpeculationStats],
    ) -> list[TokenChunk]:
        self._compact(slices, verdicts)
        chunks = []
        for part in slices:
            sequence, verdict = part.sequence, verdicts.get(part.sequence.rid)
            computed = sequence.table.computed + part.pending
            if verdict is None:
                self.cache.commit(sequence.table, sequence.tokens, computed)
                continue
            decoded = part.pending == 1 and sequence.generated > 0  # else it ended a prefill
            kept, finish = self._keep(sequence, verdict.tokens)
            self.cache.commit(sequence.table, sequence.tokens, computed + min(kept, len(verdict.path)))
            tree = trees.get(sequence.rid)
            if decoded:
                stats = round_stats(len(tree) if tree else 0, verdict, kept)
                sequence.stats += stats
                counts[sequence.key] += stats
            if finish:
                chunks.append(self._finish(sequence, finish))
                continue
            self._advance_draft(sequence, kept)
            chunks += self._chunk(sequence)
        return chunks

    def _compact(self, slices: list[Slice], verdicts: Mapping[str, Verdict]) -> None:
        """Move the KV of accepted nodes down behind the pending token, for the whole batch at once."""
        source: list[int] = []
        target: list[int] = []
        for part in slices:
            verdict = verdicts.get(part.sequence.rid)
            if verdict is None:
                continue
            table = part.sequence.table
            base = table.computed + part.pending
            moved = [(node, at) for at, node in enumerate(verdict.path) if node != at]
            source += self.cache.slots(table, (base + node for node, _ in moved))
            target += self.cache.slots(table, (base + at for _, at in moved))
        if source:
            self.runner.move(source, target)

    def _keep(self, sequence: Sequence, tokens: Iterable[int]) -> tuple[int, FinishReason | None]:
        """Append tokens until EOS, a stop string or max_tokens ends the sequence inside the block."""
        kept = 0
        for token in tokens:
            kept += 1
            sequence.tokens.append(token)
            if token in self._eos and not sequence.request.sampling.ignore_eos:
                sequence.output.end(token)
                return kept, "stop"
            if sequence.output.push(token):
                return kept, "stop"
            if sequence.remaining <= 0:
                return kept, "length"
        return kept, None

    def _advance_draft(self, sequence: Sequence, kept: int) -> None:
        drafter = self._drafter(sequence)
        if drafter and drafter.length(sequence.rid) == len(sequence.tokens) - kept:
            drafter.commit(sequence.rid, sequence.tokens[-kept:])

    def _release_draft(self, sequence: Sequence) -> None:
        if drafter := self._drafter(sequence):
            drafter.release(sequence.rid)

    def _drafter(self, sequence: Sequence) -> Drafter | None:
        return self.drafters.get(sequence.request.plan.drafter or "")

    def _chunk(self, sequence: Sequence) -> list[TokenChunk]:
        ids, text = sequence.output.take(final=False)
        if not ids:
            return []
        first, sequence.delivered = sequence.delivered, sequence.delivered + len(ids)
        return [TokenChunk(sequence.request.request_id, sequence.index, first, tuple(ids), text)]

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> TokenChunk:
        self._release_draft(sequence)
        self.scheduler.remove(sequence)
        sequence.finish = reason
        ids, text = sequence.output.take(final=True)
        return TokenChunk(
            request_id=sequence.request.request_id,
            sequence=sequence.index,
            first_position=sequence.delivered,
            ids=tuple(ids),
            text=text,
            finish=reason,
            stats=sequence.stats,
            cached_tokens=sequence.cached_tokens,
            error=error,
        )

    # Events ------------------------------------------------------------------------------------------

    def _add(self, request: GenerateRequest) -> list[TokenChunk]:
        leader: Sequence | None = None
        for index in range(request.n):
            generated = request.generated[index] if request.generated else ()
            output = OutputText(self._decoder, request.sampling.stop)
            output.resume(generated)
            sequence = Sequence(
                request=request,
                index=index,
                tokens=[*request.prompt, *generated],
                output=output,
                table=BlockTable(salt=request.tenant.encode()),
                leader=leader,
                delivered=len(generated),
            )
            leader = leader or sequence
            self.scheduler.add(sequence)
        return []

    def _finish_all(self, request_id: str, reason: FinishReason) -> list[TokenChunk]:
        mine = [s for s in self.scheduler if s.request.request_id == request_id]
        return [self._finish(sequence, reason) for sequence in mine]

    def _set_policy(self, policy: PolicySnapshot) -> list[TokenChunk]:
        self.policy = policy
        return []

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            name=self.options.name,
            vocab_size=self.runner.vocab_size,
            max_model_len=self.max_model_len,
            dtype=str(self.runner.dtype).removeprefix("torch."),
            device=str(self.runner.device),
            drafters=tuple(self.drafters),
        )

    @property
    def max_model_len(self) -> int:
        """Prompt and output together; the KV pool may hold less than the model allows."""
        return min(self.runner.max_model_len, self.cache.capacity)

    def _report(
        self,
        schedule: Schedule,
        trees: Mapping[str, DraftTree],
        counts: Mapping[Key, SpeculationStats],
        marks: list[float],
    ) -> StepReport:
        running = Counter(sequence.key for sequence in self.scheduler.running)
        spans = [after - before for before, after in pairwise(marks)]
        return StepReport(
            step=self.steps,
            running=len(self.scheduler.running),
            waiting=self.scheduler.waiting,
            prefill_tokens=sum(part.pending for part in schedule.slices if part.pending > 1),
            verified_nodes=sum(map(len, trees.values())),
            kv_used_blocks=self.cache.pool.used,
            kv_total_blocks=self.cache.pool.num_blocks,
            preempted=len(schedule.preempted),
            kv_shrunk=schedule.kv_shrunk,
            schedule_s=spans[0],
            draft_s=spans[1],
            verify_s=spans[2],
            commit_s=spans[3],
            counts=tuple(KeyCounts(*key, running[key], stats) for key, stats in counts.items()),
        )
