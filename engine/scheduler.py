"""Who runs in the next step: continuous batching, chunked prefill, fairness over tenants, preemption.

The token budget gives one token to every decoding sequence, then to drafts (at most 70 %, and less while
prompts wait), then to prompts. KV blocks go to decoding first, then to new prompts, and to drafts last: a
draft never takes what plain decoding needs.

Asynchronously a sequence that speculates runs in every second step. In those between it sits out: its draft
is under way, with its KV claimed. About half of them do so in each step, whoever has joined or left.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from gammaray.engine.depth import allowed_shape, reserved_slots, share_depth
from gammaray.engine.fairness import Service, share_room
from gammaray.engine.kv import KVCache
from gammaray.engine.sequence import Sequence, State
from gammaray.types import PolicySnapshot

DRAFT_SHARE = 0.7  # at least 30 % of a step's tokens stay for plain decoding (math.md section 5)
PREFILL_SHARE = 0.25  # of the budget that drafts leave to waiting prompts
PATIENCE = 32  # admissions of others that a sequence waits for room


@dataclass(frozen=True, slots=True)
class Slice:
    """One sequence's part of a step."""

    sequence: Sequence
    pending: int  # tokens to feed; fewer than sequence.pending: an unfinished prompt chunk
    depth: int = 0
    width: int = 1


@dataclass(slots=True)
class Schedule:
    slices: list[Slice] = field(default_factory=list)
    drafting: list[Slice] = field(default_factory=list)  # what drafters begin: of these, or of who sits out
    preempted: list[Sequence] = field(default_factory=list)
    kv_shrunk: int = 0


class Scheduler:
    def __init__(
        self,
        cache: KVCache,
        max_batch: int,
        token_budget: int,
        reusable: Callable[[Sequence], int | None] = lambda sequence: None,
        asynchronous: bool = False,
    ) -> None:
        """`reusable`: tokens of its prompt that a sequence may take from the prefix cache; None: all."""
        self.cache = cache
        self._reusable = reusable
        self._asynchronous = asynchronous
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.running: list[Sequence] = []
        self._waiting: dict[str, deque[Sequence]] = {}  # tenants that wait; the first is served next
        self._suspects: list[Sequence] = []  # of a step that failed; they run one at a time
        self._service = Service()
        self._policy = PolicySnapshot()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        for queue in self._waiting.values():
            yield from queue

    def add(self, sequence: Sequence) -> None:
        """Behind all of its tenant's that are at least as urgent."""
        tenant = sequence.request.tenant
        if not self.running and not self._waiting:
            self._service = Service()  # nobody to compare with: counters need not grow for ever
        if tenant not in self._waiting:
            self._service.enter(tenant, self._waiting)
        queue = self._waiting.setdefault(tenant, deque())
        queue.insert(bisect_right(queue, _urgency(sequence), key=_urgency), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished sequence out, wherever it is, with its KV."""
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        else:
            queue = self._waiting[sequence.request.tenant]
            queue.remove(sequence)
            if not queue:
                del self._waiting[sequence.request.tenant]
        self.cache.free(sequence.table)
        sequence.state, sequence.begun = State.FINISHED, None

    def suspect_all(self) -> list[Sequence]:
        """Preempt everything that runs. Until it is acquitted each runs alone, and nothing else does."""
        self._suspects = [self._preempt(sequence) for sequence in reversed(self.running)][::-1]
        return list(self._suspects)

    def acquit(self, sequence: Sequence) -> bool:
        """It ran alone without a failure. True when it was preempted to let the next one do so."""
        self._suspects.remove(sequence)
        if self._suspects:
            self._preempt(sequence)
        return bool(self._suspects)

    def schedule(self, policy: PolicySnapshot) -> Schedule:
        self._policy = policy
        schedule = Schedule()
        decoding = self._claim_decodes(schedule)
        (self._alternate if self._asynchronous else self._together)(decoding, schedule)
        for part in schedule.slices:
            tenant = part.sequence.request.tenant
            self._service.charge(tenant, part.pending + part.depth * part.width, self._weight(tenant))
        return schedule

    def _together(self, decoding: list[Sequence], schedule: Schedule) -> None:
        """Drafts are verified in the step that makes them."""
        wants = [allowed_shape(sequence, self._policy) for sequence in decoding]
        room = self._draft_room(len(decoding))
        drafted = min(room, sum(depth * width for depth, width in wants))
        prompts = self._claim_rest(self.token_budget - len(decoding) - drafted, schedule)
        parts = self._claim_drafts(decoding, wants, room, schedule)
        schedule.slices, schedule.drafting = parts + prompts, [part for part in parts if part.depth > 0]

    def _alternate(self, decoding: list[Sequence], schedule: Schedule) -> None:
        """Drafts that were begun in the last step are verified, while others begin, of whom none is fed."""
        rest = [sequence for sequence in decoding if not sequence.begun]
        ready = [self._ready(sequence) for sequence in decoding if sequence.begun]
        drafted = sum(part.depth * part.width for part in ready)
        prompts = self._claim_rest(self.token_budget - len(decoding) - drafted, schedule)
        room = self._draft_room(len(self.running))  # of the next step, in which all that run may decode
        parts = self._claim_drafts(rest, self._half(rest, len(ready)), room, schedule)
        schedule.drafting = [part for part in parts if part.depth > 0]
        for part in schedule.drafting:
            part.sequence.begun = part.depth, part.width
        schedule.slices = ready + [part for part in parts if not part.depth] + prompts

    def _ready(self, sequence: Sequence) -> Slice:
        begun, sequence.begun = sequence.begun, None
        allowed, _ = allowed_shape(sequence, self._policy)  # speculation may be off by now
        return Slice(sequence, 1, *(begun if begun and allowed else (0, 1)))

    def _half(self, rest: list[Sequence], ready: int) -> list[tuple[int, int]]:
        """The shapes that they want, for so many that about as many draft as are verified: where there are
        more, the newest decode plainly once, and have then changed sides."""
        wants = [allowed_shape(sequence, self._policy) for sequence in rest]
        willing = [index for index, (depth, _) in enumerate(wants) if depth > 0]
        begin = set(willing[: (ready + len(willing) + 1) // 2])
        return [want if index in begin else (0, 1) for index, want in enumerate(wants)]

    def _weight(self, tenant: str) -> float:
        return self._policy.weights.get(tenant, 1.0)

    def _claim_decodes(self, schedule: Schedule) -> list[Sequence]:
        """A slot for the pending token of every decoding sequence; drafts make way, then the newest ones."""
        for sequence in list(self.running):
            while (
                sequence.state is State.RUNNING
                and sequence.decoding
                and not self.cache.grow(sequence.table, len(sequence.tokens))
            ):
                if not self._drop_draft(schedule):
                    schedule.preempted.append(self._preempt(self._victim()))
        return [s for s in self.running if s.decoding]

    def _drop_draft(self, schedule: Schedule) -> bool:
        """The newest draft that was begun is not verified, so that its KV is free. False: there is none."""
        holders = (s for s in reversed(self.running) if s.begun and s.begun[0])
        if (holder := next(holders, None)) is None:
            return False
        holder.begun = 0, 1
        holder.note("kv")
        schedule.kv_shrunk += 1
        self.cache.commit(holder.table, holder.tokens, holder.table.computed)
        return True

    def _victim(self) -> Sequence:
        """Of the tenant that holds the most KV for its weight, the least urgent; of those the newest."""
        held = self._held()
        tenant = max(held, key=lambda tenant: held[tenant] / self._weight(tenant))
        own = [s for s in reversed(self.running) if s.request.tenant == tenant]
        return max(own, key=_urgency)

    def _held(self) -> dict[str, int]:
        """KV blocks by tenant; the newest tenants come first."""
        held: dict[str, int] = {}
        for sequence in reversed(self.running):
            tenant = sequence.request.tenant
            held[tenant] = held.get(tenant, 0) + len(sequence.table.blocks)
        return held

    def _draft_room(self, decoding: int) -> int:
        work = sum(s.pending for s in self if not s.decoding)
        prefill = min(work, max(1, int(PREFILL_SHARE * self.token_budget)))
        most = int(DRAFT_SHARE * self.token_budget)
        return max(0, min(most, self.token_budget - decoding - prefill))

    def _claim_drafts(
        self, decoding: list[Sequence], wants: list[tuple[int, int]], room: int, schedule: Schedule
    ) -> list[Slice]:
        slices = []
        for sequence, (_, width), depth in zip(
            decoding, wants, self._share(decoding, wants, room), strict=True
        ):
            fitted = self._fit_tree(sequence, depth, width)
            schedule.kv_shrunk += depth > 0 and fitted != (depth, width)
            if depth > 0 and not fitted[0]:
                sequence.note("kv")
            slices.append(Slice(sequence, 1, *fitted))
        return slices

    def _share(self, decoding: list[Sequence], wants: list[tuple[int, int]], room: int) -> list[int]:
        """Depths: each tenant shares the room that it gets among its own."""
        members: dict[str, list[int]] = {}
        for index, sequence in enumerate(decoding):
            members.setdefault(sequence.request.tenant, []).append(index)
        nodes = {t: sum(wants[i][0] * wants[i][1] for i in own) for t, own in members.items()}
        depths = [0] * len(wants)
        for tenant, share in share_room(nodes, self._policy.weights, room).items():
            own = members[tenant]
            for index, depth in zip(own, share_depth([wants[i] for i in own], share), strict=True):
                depths[index] = depth
        return depths

    def _fit_tree(self, sequence: Sequence, depth: int, width: int) -> tuple[int, int]:
        """The largest draft that the reservation and the pool hold: narrower, then a chain, then shorter."""
        context = len(sequence.tokens)
        cap = reserved_slots(context, depth)
        while depth:
            slots = context + depth * width
            if slots <= cap and self.cache.grow(sequence.table, slots):
                return depth, width
            depth, width = (depth, width - 1) if width > 1 else (depth - 1, 1)
        return 0, 1

    def _claim_rest(self, room: int, schedule: Schedule) -> list[Slice]:
        """Prompts that have begun, and new ones."""
        prompts = self._claim_prompts(room)
        if not schedule.preempted:  # else the evicted would push their evictors out again
            prompts += self._claim_admissions(room - sum(part.pending for part in prompts))
        return prompts

    def _claim_prompts(self, room: int) -> list[Slice]:
        slices = []
        for sequence in self.running:
            if room > 0 and not sequence.decoding:
                slices.append(Slice(sequence, min(sequence.pending, room)))
                room -= slices[-1].pending
        return slices

    def _claim_admissions(self, room: int) -> list[Slice]:
        slices: list[Slice] = []
        while room > 0 and (admitted := self._admit()) is not None:
            slices.append(Slice(admitted, min(admitted.pending, room)))
            room -= slices[-1].pending
        return slices

    def _admit(self) -> Sequence | None:
        """The next waiting sequence whose whole prompt has room, the least served tenant's first.

        A large prompt may be overtaken by smaller ones for a while; then all wait until it fits.
        """
        if len(self.running) >= (1 if self._suspects else self.max_batch):
            return None
        if self._suspects:
            return self._admit_suspect(self._suspects[0])
        held = self._held()
        heads = {tenant: queue[0] for tenant, queue in self._waiting.items()}
        able = [t for t, head in heads.items() if self._has_share(head, held)]  # for others nobody waits
        out_of_patience = [tenant for tenant in able if heads[tenant].overtaken >= PATIENCE]
        passed: list[Sequence] = []
        for tenant in out_of_patience[:1] or self._service.order(able):
            head = heads[tenant]
            if self._has_room(head):
                return self._start(tenant, passed)
            passed.append(head)
        return None

    def _admit_suspect(self, sequence: Sequence) -> Sequence:
        """Nothing else runs, so there is room."""
        tenant = sequence.request.tenant
        self._waiting[tenant].remove(sequence)
        self._waiting[tenant].appendleft(sequence)
        assert self._has_room(sequence)
        return self._start(tenant, [])

    def _start(self, tenant: str, passed: list[Sequence]) -> Sequence:
        queue = self._waiting.pop(tenant)
        sequence = queue.popleft()
        if queue:
            self._waiting[tenant] = queue  # its next turn comes last
        for other in passed:
            other.overtaken += 1
        self._service.admit(tenant)
        sequence.state = State.RUNNING
        self.running.append(sequence)
        return sequence

    def _has_share(self, sequence: Sequence, held: Mapping[str, int]) -> bool:
        """Its tenant keeps to its share of the KV pool while others wait; `held`: blocks by tenant."""
        tenant = sequence.request.tenant
        share = self._policy.kv_shares.get(tenant, 1.0)
        if share == 1 or tenant not in held or len(self._waiting) == 1:
            return True
        needed = self.cache.blocks_for(len(sequence.tokens))
        return held[tenant] + needed <= share * self.cache.pool.num_blocks

    def _has_room(self, sequence: Sequence) -> bool:
        """Blocks for all its tokens, plus one for each running sequence to decode into."""
        leader = sequence.leader
        if leader is not None and not leader.prefilled:
            return False
        reusable = self._reusable(sequence)
        if not sequence.scoring:
            self.cache.attach(sequence.table, sequence.tokens, reusable)
        spare = len(self.running)
        missing = self.cache.blocks_for(len(sequence.tokens)) - len(sequence.table.blocks)
        if missing + spare <= self.cache.pool.available and self.cache.grow(
            sequence.table, len(sequence.tokens)
        ):
            if not sequence.preemptions:
                sequence.cached_tokens = sequence.table.computed
                self.cache.count_reuse(sequence.table)
            return True
        self.cache.free(sequence.table)
        return False

    def _preempt(self, sequence: Sequence) -> Sequence:
        """Back to its queue, ahead of what is no more urgent, without KV; it resumes by prefilling what it
        has so far."""
        self.running.remove(sequence)
        self.cache.free(sequence.table)
        sequence.state, sequence.begun = State.WAITING, None
        sequence.preemptions += 1
        if sequence.scoring:
            sequence.prompt_logprobs = [None]  # the prompt is computed from its beginning again
        queue = self._waiting.setdefault(sequence.request.tenant, deque())
        queue.insert(bisect_left(queue, _urgency(sequence), key=_urgency), sequence)
        return sequence


def _urgency(sequence: Sequence) -> int:
    """Lower runs earlier, among the sequences of one tenant."""
    return sequence.request.priority
