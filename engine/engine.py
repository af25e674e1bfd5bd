"""The decode loop of one replica. Engine.step() is the only place where request state changes.

    schedule -> draft -> verify -> accept -> commit

for the whole batch at once. Submissions, aborts and policies may come from any thread; they queue up
and are applied at the start of a step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from gammaray.engine import quality
from gammaray.engine.admission import check_request
from gammaray.engine.breaker import Trial
from gammaray.engine.discreet import described
from gammaray.engine.drafters.base import Drafter, DraftTree
from gammaray.engine.drafting import Asked, Drafts, GuardedDrafter, begin, collect
from gammaray.engine.grammar import GrammarCompiler, Matcher, prune
from gammaray.engine.intake import Intake
from gammaray.engine.kv import KVCache
from gammaray.engine.oracle import Oracle
from gammaray.engine.profile import StepProfile
from gammaray.engine.report import Told, Watch, costs, finished, report, round_key, traced
from gammaray.engine.round import Round, compute, moves
from gammaray.engine.runner import ModelRunner
from gammaray.engine.scheduler import Schedule, Scheduler, Slice
from gammaray.engine.sequence import Sequence
from gammaray.engine.text import TextDecoder
from gammaray.engine.trimmer import Trimmer
from gammaray.errors import ConfigError, EngineFailure, InvalidRequest, Overloaded, ReplicaLost
from gammaray.types import (
    FinishReason,
    GenerateRequest,
    Grammar,
    ModelInfo,
    PolicySnapshot,
    Quality,
    Reuse,
    StepReport,
    TokenChunk,
)

log = logging.getLogger(__name__)

ACQUITTED_AFTER = 2  # rounds that a sequence of a failed step runs alone: its prompt's, and one with a draft
DEAD_END = (
    "no token can follow: the model's logits are not finite, or grammar and bad_words exclude each other"
)
TOKEN_BUDGET = 256  # large enough to feed the cores, small enough that a prompt chunk delays decoding little


@dataclass(frozen=True, slots=True)
class EngineOptions:
    name: str = "model"  # what clients call it
    max_batch: int = 64  # running sequences
    token_budget: int = TOKEN_BUDGET  # tokens the target is fed in a step
    prefix_cache: bool = True
    draft_deadline_s: float = 0.1  # given to drafters; those of this process answer in any case
    asynchronous: bool = False  # while a half of the sequences that speculate is verified, the other drafts
    max_waiting: int = 512  # sequences that may wait for a place among those that run
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
        grammars: GrammarCompiler | None = None,
        profile: StepProfile | None = None,
    ) -> None:
        """`profile`: what steps of this runner cost; None: nobody knows, and drafts count as free and are
        verified whole."""
        if options.token_budget < options.max_batch:
            raise ConfigError(
                f"token_budget {options.token_budget} is below max_batch {options.max_batch}: every sequence "
                "that decodes takes a token a step"
            )
        self.runner = runner
        self.drafters = {name: GuardedDrafter(name, drafter) for name, drafter in (drafters or {}).items()}
        self.cache = KVCache(runner.num_blocks, runner.block_size, options.prefix_cache)
        self.scheduler = Scheduler(
            self.cache, options.max_batch, options.token_budget, self._reusable, options.asynchronous
        )
        self.options = options
        self.policy = PolicySnapshot()
        self.steps = 0
        self._intake = Intake(decoder, eos, runner.vocab_size)
        self._grammars = grammars
        self._clock = clock
        self._inbox: deque[Callable[[], None]] = deque()
        self._unfinished: dict[str, int] = {}  # sequences by request id
        self._outbox: list[TokenChunk] = []  # kept over a step that raises: a finish must arrive
        self._oracle = Oracle(runner, self.cache, self.drafters) if options.oracle else None
        self._profile = profile
        self._trimmer = None if profile is None else Trimmer(profile)
        self._asked = Asked()  # asynchronously: by the last step
        self._told = Told()  # of the step that runs
        self._audit: quality.Audit | None = None  # of one sequence at a time

    # From any thread ---------------------------------------------------------------------------------

    def compile(self, grammar: Grammar) -> Matcher:
        """For `submit`; takes up to seconds. Raises InvalidRequest."""
        if self._grammars is None:
            raise InvalidRequest("this engine has no grammars", param="response_format")
        return self._grammars.compile(grammar)

    def submit(self, request: GenerateRequest, matcher: Matcher | None = None) -> None:
        """Queue a request. Raises InvalidRequest when it can never run, Overloaded when too many wait.

        `matcher`: of the request's grammar; None: it is compiled here.
        """
        check_request(request, self.info)
        if request.sampling.grammar is not None:
            matcher = matcher or self.compile(request.sampling.grammar)
        if request.request_id in self._unfinished:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if request.n > self._places:
            raise InvalidRequest(f"n {request.n} exceeds the engine's {self._places} places", param="n")
        resumed = any(request.generated)  # it had its place before
        if not resumed and request.n + sum(list(self._unfinished.values())) > self._places:
            raise Overloaded("too many requests are waiting; try again", code="queue_full")
        self._unfinished[request.request_id] = request.n
        self._inbox.append(partial(self._add, request, matcher, self._clock()))

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
        """One round for everything that runs. After an exception `fail_all` must follow.

        ReplicaLost: the target is gone, so there is nothing left to step.
        """
        self._drain()
        watch = Watch(self._clock)
        drafts = self._collect()  # asynchronously: what was begun in the last step
        watch.end("draft")
        schedule = self._schedule(watch.began)
        watch.end("schedule")
        done = Round()
        try:
            self._asked = begin(schedule.drafting, self.drafters, self._clock)
            if not self.options.asynchronous:
                drafts = self._collect()
            drafts, proposed = self._draft(schedule.slices, drafts)
            watch.end("draft")
            layers = self._layers(schedule.slices)
            computed = compute(self.runner, schedule.slices, drafts.trees, proposed, layers)
            self.runner.move(*moves(computed, self.cache))
            self._told.costs = costs(computed, drafts.seconds, self._profile)
            done = computed
        except ReplicaLost:  # no fault of a sequence
            raise
        except Exception as error:  # no sequence has changed yet
            self._isolate(schedule.slices or schedule.drafting, error)
        watch.end("verify")
        for part in done.slices:
            self._commit_guarded(part, done)
        if self._oracle and done.logits is not None:
            self._oracle.check(done, [sequence.table for sequence in self.scheduler])
        watch.end("commit")
        if self._trimmer is not None:
            self._trimmer.state_s = watch.seconds["schedule"] + watch.seconds["commit"]
        self.steps += 1
        told = report(self.steps, self.scheduler, schedule, done, self._tell(), watch)
        return StepOutput(self._take_chunks(), told)

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

    def _tell(self) -> Told:
        told, self._told = self._told, Told()
        told.drafter_failures = sum(drafter.take_failures() for drafter in self.drafters.values())
        told.target_reuse = self.cache.take_reuse()
        told.draft_reuse = sum((drafter.take_reuse() for drafter in self.drafters.values()), Reuse())
        return told

    def _schedule(self, now: float) -> Schedule:
        schedule = self.scheduler.schedule(self.policy)
        for sequence in schedule.preempted:
            self._release_draft(sequence)
        for part in schedule.slices:
            if part.sequence.started is None:
                part.sequence.started = now
        return schedule

    def _collect(self) -> Drafts:
        """What drafters were told to begin and have made by now, also for what has ended meanwhile."""
        asked, self._asked = self._asked, Asked()
        deadline = self._clock() + self.options.draft_deadline_s
        return collect(asked, self.drafters, self.runner.vocab_size, deadline, self._clock)

    def _draft(self, slices: list[Slice], drafts: Drafts) -> tuple[Drafts, dict[str, int]]:
        """What was drafted for these, short of what grammars forbid and of what is not worth verifying, and
        how many nodes were proposed."""
        wanted = {part.sequence.rid for part in slices if part.depth > 0}
        trees = drafts.trees = {rid: tree for rid, tree in drafts.trees.items() if rid in wanted}
        drafted = {rid: len(tree) for rid, tree in trees.items()}
        for part in slices:
            sequence, rid = part.sequence, part.sequence.rid
            if part.depth > 0:
                sequence.note(drafts.troubles.get(rid))
            if sequence.matcher is not None and rid in trees:
                pruned = _pruned(trees.pop(rid), sequence.matcher)
                trees |= {} if pruned is None else {rid: pruned}
        if trees and self._trimmer is not None:
            trimmed = self._trimmer.trim(slices, trees, drafts.seconds, self.steps)
            drafts.trees = trimmed.trees
            self._told.biased, self._told.trimmed_nodes = trimmed.biased, trimmed.nodes
        return drafts, drafted

    def _commit_guarded(self, part: Slice, done: Round) -> None:
        """What fails here, a tokenizer or a grammar, fails for one sequence."""
        try:
            self._commit(part, done)
        except ReplicaLost:  # no fault of a sequence
            raise
        except Exception as error:
            log.error("sequence %s failed (%s)\n%s", part.sequence.rid, *described(error))
            self._finish(part.sequence, "error", f"the engine failed: {type(error).__name__}")

    def _commit(self, part: Slice, done: Round) -> None:
        sequence, rid = part.sequence, part.sequence.rid
        computed = sequence.table.computed + part.pending
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs += done.prompt_logprobs.get(rid, [])
        verdict = done.verdicts.get(rid)
        if verdict is None:
            self.cache.commit(sequence.table, sequence.tokens, computed)
            self._advance_draft(part, done, 0)
            return
        decoded = sequence.decoding  # else it ended a prefill
        self._begin_audit(sequence)
        kept, finish = sequence.keep(verdict.tokens)
        sequence.logprobs += done.logprobs.get(rid, [])[:kept]
        self.cache.commit(sequence.table, sequence.tokens, computed + min(kept, len(verdict.path)))
        if self._audit is not None and self._audit.rid == rid:
            self._audit.add(done.rows_of(rid, kept))
        if decoded:
            self._count(part, done, kept)
        if sequence.first_token is None:
            sequence.first_token = self._clock()
        if sequence.request.trace is not None:
            self._told.traced.append(traced(part, done, kept))
        if finish or verdict.failed:
            self._finish(sequence, finish or "error", None if finish else DEAD_END)
            return
        self._advance_draft(part, done, kept)
        self._deliver(sequence)
        self._acquit(sequence)

    def _count(self, part: Slice, done: Round, kept: int) -> None:
        """A decode round. A shadow's own is plain; what it would have been counts for its key."""
        sequence, rid, key = part.sequence, part.sequence.rid, round_key(part)
        drafted, tree = done.drafted.get(rid, 0), done.trees.get(rid)
        tally, verdict = self._told.tallies[key], done.verdicts[rid]
        biased = rid in self._told.biased
        sequence.pace.end_round()
        if self._trimmer is not None:
            self._trimmer.learn(sequence, tree, done.shadows.get(rid, verdict))
        if (would := done.shadows.get(rid)) is not None and part.depth > 0:
            tally.add(drafted, tree, would, len(would.tokens), biased)
            sequence.shadow.add(drafted, tree, would, len(would.tokens), biased)
            sequence.tally.add(0, None, verdict, kept)
            sequence.ahead = len(would.tokens) - 1  # it drafts next where it would have been then
            return
        sequence.ahead = max(0, sequence.ahead - 1)
        tally.add(drafted, tree, verdict, kept, biased)
        sequence.tally.add(drafted, tree, verdict, kept, biased)
        if verdict.tested and sequence.request.plan.breaks:
            base, extra = self._told.costs.get(key, (0.0, 0.0))
            sequence.breaker.add(Trial(verdict.tested, verdict.ranks.count(0), kept, base, extra))

    def _begin_audit(self, sequence: Sequence) -> None:
        if self._audit is None and quality.due(sequence, self.policy):
            self._audit = quality.Audit(sequence.rid)

    def _end_audit(self, sequence: Sequence, reason: FinishReason) -> Quality | None:
        """What the audit found, if it was of this sequence. It takes a dense pass, which may fail."""
        audit = self._audit
        if audit is None or audit.rid != sequence.rid:
            return None
        self._audit = None
        if reason not in ("stop", "length"):
            return None
        try:
            return quality.judge(audit, sequence, self.runner)
        except ReplicaLost:
            raise
        except Exception as error:
            log.error("the audit of %s failed (%s)\n%s", sequence.rid, *described(error))
            return None

    def _advance_draft(self, part: Slice, done: Round, kept: int) -> None:
        """`kept` tokens were committed; none: the slice was a part of a prompt."""
        sequence, rid = part.sequence, part.sequence.rid
        drafter = self._drafter(sequence)
        if drafter is None or sequence.breaker.open:
            return
        if drafter.top and kept:
            drafter.observe(rid, done.trees.get(rid), done.likeliest(rid, drafter.top))
        known = drafter.length(rid)
        if drafter.layers:
            features = done.features_of(part, kept, drafter.layers)
            end = len(sequence.tokens) if kept else sequence.table.computed + 1
            first = end - len(features)  # whose predecessor was fed first
            if known is not None and first <= known < end:
                drafter.commit(rid, sequence.tokens[known:end], features[known - first :])
        elif kept and known == len(sequence.tokens) - kept:
            drafter.commit(rid, sequence.tokens[-kept:])

    def _layers(self, slices: list[Slice]) -> tuple[int, ...]:
        """Whose hidden states the drafters of these slices continue."""
        drafters = (self._drafter(part.sequence) for part in slices if not part.sequence.breaker.open)
        return tuple(sorted({layer for drafter in drafters if drafter for layer in drafter.layers}))

    def _reusable(self, sequence: Sequence) -> int | None:
        """What the target may skip of a sequence that begins: what its drafter need not see pass by."""
        drafter = self._drafter(sequence)
        if drafter is None or not drafter.layers or sequence.breaker.open:
            return None
        drafter.catch_up(sequence.rid, sequence.tokens, sequence.table.salt)
        return (drafter.length(sequence.rid) or 1) - 1

    def _release_draft(self, sequence: Sequence) -> None:
        if drafter := self._drafter(sequence):
            drafter.release(sequence.rid)

    def _drafter(self, sequence: Sequence) -> GuardedDrafter | None:
        return self.drafters.get(sequence.request.plan.drafter or "")

    def _deliver(self, sequence: Sequence) -> None:
        ids, text = sequence.output.take(final=False)
        if ids:
            self._outbox.append(sequence.chunk(ids, text))

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        # What is held back was computed, but may begin a stop string: an end that came too early keeps it.
        ids, text = sequence.output.take(final=reason in ("stop", "length"))
        if sequence.output.stopped and reason == "length":
            reason = "stop"
        self._release_draft(sequence)
        self.scheduler.remove(sequence)
        self._forget(sequence.request.request_id)
        last = sequence.chunk(ids, text)
        found = self._end_audit(sequence, reason)
        self._told.finished.append(finished(sequence, reason, self._clock(), found))
        self._outbox.append(
            replace(
                last,
                finish=reason,
                stats=sequence.tally.stats(),
                cached_tokens=sequence.cached_tokens,
                error=error,
            )
        )

    def _forget(self, request_id: str) -> None:
        self._unfinished[request_id] -= 1
        if not self._unfinished[request_id]:
            del self._unfinished[request_id]

    # Failed steps ------------------------------------------------------------------------------------

    def _isolate(self, slices: list[Slice], error: Exception) -> None:
        """A step failed. A sequence that ran alone is the cause; of several, each runs alone for a while.

        Every round alone makes progress, so a failure that only the batch has costs speed, not requests.
        """
        log.error("engine step failed (%s)\n%s", *described(error))
        if len(slices) == 1:
            self._finish(slices[0].sequence, "error", f"the engine failed: {type(error).__name__}")
            return
        for sequence in self.scheduler.suspect_all():
            sequence.suspect_rounds = ACQUITTED_AFTER
            self._release_draft(sequence)

    def _acquit(self, sequence: Sequence) -> None:
        if sequence.suspect_rounds:
            sequence.suspect_rounds -= 1
            if not sequence.suspect_rounds and self.scheduler.acquit(sequence):
                self._release_draft(sequence)

    # Events ------------------------------------------------------------------------------------------

    def _add(self, request: GenerateRequest, matcher: Matcher | None, submitted: float) -> None:
        try:
            begun = self._intake.begin(request, matcher)
        except Exception as error:  # of the tokenizer or the grammar, on resumed ids
            log.error("request %s could not begin (%s)\n%s", request.request_id, *described(error))
            message = f"the request could not begin: {type(error).__name__}"
            self._outbox += [
                TokenChunk(request.request_id, index, 0, (), "", finish="error", error=message)
                for index in range(request.n)
            ]
            del self._unfinished[request.request_id]
            return
        for sequence, finish in begun:
            sequence.submitted = submitted
            self.scheduler.add(sequence)
            if finish:
                self._finish(sequence, finish)

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
            places=self._places,
        )

    @property
    def _places(self) -> int:
        return self.options.max_batch + self.options.max_waiting

    @property
    def max_model_len(self) -> int:
        """Prompt and output together; the KV pool may hold less than the model allows."""
        return min(self.runner.max_model_len, self.cache.capacity)


def _pruned(tree: DraftTree, matcher: Matcher) -> DraftTree | None:
    """A grammar that gives up costs a draft here; its own request fails when it is verified."""
    try:
        return prune(tree, matcher)
    except EngineFailure:
        return None
