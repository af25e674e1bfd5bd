"""The decode loop of one replica. Engine.step() is the only place where request state changes.

    schedule -> draft -> verify -> accept -> commit

for the whole batch at once. Submissions, aborts and policies may come from any thread; they queue up
and are applied at the start of a step.
"""

from __future__ import annotations

import logging
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
from gammaray.engine.drafting import GuardedDrafter, draft
from gammaray.engine.kv import BlockTable, KVCache
from gammaray.engine.oracle import Oracle
from gammaray.engine.runner import ModelRunner
from gammaray.engine.scheduler import Schedule, Scheduler, Slice
from gammaray.engine.sequence import Key, Sequence, round_stats
from gammaray.engine.text import OutputText, TextDecoder
from gammaray.engine.verifier import Verdict, VerifyJob, verify
from gammaray.errors import ConfigError, InvalidRequest
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

log = logging.getLogger(__name__)

TOKEN_BUDGET = 256  # large enough to feed the cores, small enough that a prompt chunk delays decoding little


@dataclass(frozen=True, slots=True)
class EngineOptions:
    name: str = "model"  # what clients call it
    max_batch: int = 64  # running sequences
    token_budget: int = TOKEN_BUDGET  # tokens the target is fed in a step
    prefix_cache: bool = True
    draft_deadline_s: float = 0.1  # given to drafters; those of this process answer in any case
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
        self.drafters = {name: GuardedDrafter(name, drafter) for name, drafter in (drafters or {}).items()}
        self.cache = KVCache(runner.num_blocks, runner.block_size, options.prefix_cache)
        self.scheduler = Scheduler(self.cache, options.max_batch, options.token_budget)
        self.options = options
        self.policy = PolicySnapshot()
        self.steps = 0
        self._decoder = decoder
        self._eos = frozenset(eos)
        self._clock = clock
        self._inbox: deque[Callable[[], None]] = deque()
        self._unfinished: dict[str, int] = {}  # sequences by request id
        self._outbox: list[TokenChunk] = []  # kept over a step that raises: a finish must arrive
        self._oracle = Oracle(runner, self.cache, self.drafters) if options.oracle else None

    # From any thread ---------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request. Raises InvalidRequest when it can never run."""
        check_request(request, self.info)
        if request.request_id in self._unfinished:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        self._unfinished[request.request_id] = request.n
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
        """One round for everything that runs. After an exception `fail_all` must follow."""
        self._drain()
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
        self._commit(schedule.slices, verdicts, trees, counts)
        if self._oracle and logits is not None:
            tables = [sequence.table for sequence in self.scheduler]
            self._oracle.check([part.sequence for part in ends], verdicts, logits, trees, tables)
        marks.append(self._clock())
        self.steps += 1
        return StepOutput(self._take_chunks(), self._report(schedule, trees, counts, marks))

    def fail_all(self, message: str) -> list[TokenChunk]:
        """End every sequence with an error and give all its resources back, also after a step raised.

        Returns what that step could not deliver any more, too.
        """
        self._drain()
        for sequence in list(self.scheduler):
            self._finish(sequence, "error", message)
        return self._take_chunks()

    def _drain(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _take_chunks(self) -> list[TokenChunk]:
        chunks, self._outbox = self._outbox, []
        return chunks

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
    ) -> None:
        self._compact(slices, verdicts)
        for part in slices:
            sequence, verdict = part.sequence, verdicts.get(part.sequence.rid)
            computed = sequence.table.computed + part.pending
            if verdict is None:
                self.cache.commit(sequence.table, sequence.tokens, computed)
                continue
            decoded = sequence.decoding  # else it ended a prefill
            kept, finish = self._keep(sequence, verdict.tokens)
            self.cache.commit(sequence.table, sequence.tokens, computed + min(kept, len(verdict.path)))
            tree = trees.get(sequence.rid)
            if decoded:
                stats = round_stats(len(tree) if tree else 0, verdict, kept)
                sequence.stats += stats
                counts[sequence.key] += stats
            if finish:
                self._finish(sequence, finish)
            else:
                self._advance_draft(sequence, kept)
                self._deliver(sequence)

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

    def _deliver(self, sequence: Sequence) -> None:
        ids, text = sequence.output.take(final=False)
        if ids:
            self._outbox.append(
                TokenChunk(sequence.request.request_id, sequence.index, sequence.delivered, tuple(ids), text)
            )
            sequence.delivered += len(ids)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        # What is held back was computed, but may begin a stop string: an end that came too early keeps it.
        ids, text = sequence.output.take(final=reason in ("stop", "length"))
        self._release_draft(sequence)
        self.scheduler.remove(sequence)
        self._forget(sequence.request.request_id)
        self._outbox.append(
            TokenChunk(
                request_id=sequence.request.request_id,
                sequence=sequence.index,
                first_position=sequence.delivered,
                ids=tuple(ids),
                text=text,
                finish="stop" if sequence.output.stopped and reason == "length" else reason,
                stats=sequence.stats,
                cached_tokens=sequence.cached_tokens,
                error=error,
            )
        )

    def _forget(self, request_id: str) -> None:
        self._unfinished[request_id] -= 1
        if not self._unfinished[request_id]:
            del self._unfinished[request_id]

    # Events ------------------------------------------------------------------------------------------

    def _add(self, request: GenerateRequest) -> None:
        try:
            begun = [self._begin(request, index) for index in range(request.n)]
        except Exception as error:  # of the tokenizer, on resumed ids
            log.exception("request %s could not begin", request.request_id)
            message = f"the request could not begin: {type(error).__name__}"
            self._outbox += [
                TokenChunk(request.request_id, index, 0, (), "", finish="error", error=message)
                for index in range(request.n)
            ]
            del self._unfinished[request.request_id]
            return
        for sequence, finish in begun:
            sequence.leader = begun[0][0] if sequence.index else None
            self.scheduler.add(sequence)
            if finish:
                self._finish(sequence, finish)

    def _begin(self, request: GenerateRequest, index: int) -> tuple[Sequence, FinishReason | None]:
        """A sequence behind what the client has of it already, and whether that is all there is to say."""
        sequence = Sequence(
            request=request,
            index=index,
            tokens=list(request.prompt),
            output=OutputText(self._decoder, request.sampling.stop, request.prompt),
            table=BlockTable(salt=request.tenant.encode()),
        )
        _, finish = self._keep(sequence, request.generated[index] if request.generated else ())
        sequence.delivered = sequence.output.skip()
        return sequence, finish

    def _finish_all(self, request_id: str, reason: FinishReason) -> None:
        for sequence in [s for s in self.scheduler if s.request.request_id == request_id]:
            self._finish(sequence, reason)

    def _set_policy(self, policy: PolicySnapshot) -> None:
        self.policy = policy

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
            drafter_failures=sum(drafter.take_failures() for drafter in self.drafters.values()),
            schedule_s=spans[0],
            draft_s=spans[1],
            verify_s=spans[2],
            commit_s=spans[3],
            counts=tuple(KeyCounts(*key, running[key], stats) for key, stats in counts.items()),
        )
