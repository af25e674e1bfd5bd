"""The worker's end of draft links: one drafter for the sequences of several replicas, all in one batch."""

from __future__ import annotations

import gc
import hmac
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gammaray.actors.link.frames import (
    PROTOCOL,
    Asked,
    Change,
    Hello,
    Kind,
    MalformedFrame,
    Reader,
    Trees,
    Update,
    pack_text,
    pack_trees,
    read_draft,
    read_hello,
)
from gammaray.actors.link.rhythm import Rhythm
from gammaray.engine.discreet import described
from gammaray.engine.drafters.base import Anticipating, Drafter, DraftTree
from gammaray.types import MAX_TREE_NODES

log = logging.getLogger(__name__)

MOST_TOKENS = 2**20  # of a change
MOST_SEQUENCES = 2**14  # of all clients together
DONE = object()

Framed = tuple[int, bytes]  # client, frame


class Refused(Exception):
    """A client that this worker does not serve; the reason is for it to read."""


@dataclass(frozen=True, slots=True)
class Question:
    """A DRAFT frame of one client."""

    client: int
    generation: int
    number: int
    updates: list[Update]
    asked: list[Asked]

    def rid(self, handle: int) -> str:
        return _rid(self.client, handle)


@dataclass(slots=True)
class ServerStats:
    """Since the start. Seconds, and counts."""

    rounds: int = 0
    drafts: int = 0
    hits: int = 0  # drafts that had been made ahead
    passes_ahead: int = 0
    failures: int = 0  # of the draft model: each costs its sequences a round, and a catch-up
    busy_s: float = 0.0  # in answering
    clients: int = 0
    sequences: int = 0
    queued: int = 0  # questions that waited behind another when the last one was taken up


class DraftServer:
    """Frames in, frames out; owns no socket and no thread. Only `handle` and `draft_ahead` take time."""

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        name: str,
        secret: bytes,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.stats = ServerStats()
        self._drafter, self._hello = drafter, Hello(secret, vocab_size, name)
        self._clock = clock
        self._clients: set[int] = set()
        self._lengths: dict[tuple[int, int], int] = {}  # of each client's sequences, by handle
        self._ahead: Iterator[None] | None = None
        self._rhythm = Rhythm()

    def handle(self, frames: Iterable[Framed]) -> list[Framed]:
        """Answers to frames that came together. A client to be cut off gets an empty one, at the end."""
        began = self._clock()
        questions: list[Question] = []
        answers: list[Framed] = []
        for client, frame in frames:
            try:
                reader = Reader(frame)
                if reader.kind is Kind.DRAFT and self.knows(client):
                    questions.append(self._question(client, reader))
                else:
                    answers.append((client, self._greet(client, reader)))
            except (MalformedFrame, Refused) as reason:
                answers += [(client, pack_text(Kind.REFUSED, 0, 0, str(reason))), (client, b"")]
        if questions:
            self._ahead = None
            self._rhythm.asked(began)
            answers += self._answer(questions)
            self.stats.queued = len(questions) - 1
            self.stats.busy_s += self._clock() - began
            self._rhythm.answered(self._clock())
        self.stats.clients, self.stats.sequences = len(self._clients), len(self._lengths)
        return answers

    def wants_time(self) -> bool:
        """Whether a pass ahead is worth while and ends before the next question is due."""
        return self._ahead is not None and self._rhythm.allows(self._clock())

    def draft_ahead(self) -> None:
        """One pass of the draft model for outcomes of what is being verified; none where that is over."""
        if self._ahead is None:
            return
        began = self._clock()
        try:
            if next(self._ahead, DONE) is DONE:
                self._ahead = None
                return
        except Exception as error:
            self._forget(error)
        self.stats.passes_ahead += 1
        self._rhythm.passed(began, self._clock())

    def knows(self, client: int) -> bool:
        """Whether it has said hello."""
        return client in self._clients

    def leave(self, client: int) -> None:
        """Its connection is over: its sequences go."""
        self._clients.discard(client)
        for owner, handle in [key for key in self._lengths if key[0] == client]:
            self._ahead = None
            self._release(owner, handle)
        self.stats.clients, self.stats.sequences = len(self._clients), len(self._lengths)

    # Questions ---------------------------------------------------------------------------------------

    def _question(self, client: int, reader: Reader) -> Question:
        """Raises Refused for what no replica asks."""
        updates, asked = read_draft(reader)
        for update in updates:
            if len(update.tokens) > MOST_TOKENS or max(update.tokens, default=0) >= self._hello.vocab_size:
                raise Refused("tokens that are none, or too many of them")
        for view in (one.view for one in asked):
            nodes = view.depth * view.width
            if not 1 <= nodes <= MAX_TREE_NODES or not view.length:
                raise Refused(
                    f"a draft of depth {view.depth} and width {view.width} for {view.length} tokens"
                )
        if len(self._lengths) > MOST_SEQUENCES:
            raise Refused("more sequences than a worker keeps")
        return Question(client, reader.generation, reader.number, updates, asked)

    def _greet(self, client: int, reader: Reader) -> bytes:
        if reader.kind is Kind.HELLO:
            self._check(read_hello(reader))
            self._clients.add(client)
            return pack_text(Kind.WELCOME, reader.generation, reader.number)
        if reader.kind is Kind.PING and client in self._clients:
            return pack_text(Kind.PONG, reader.generation, reader.number)
        raise Refused("say hello first")

    def _check(self, hello: Hello) -> None:
        own = self._hello
        if not hmac.compare_digest(hello.secret, own.secret):
            raise Refused("the secret is not this worker's")
        if hello.protocol != PROTOCOL:
            raise Refused(f"protocol {hello.protocol}, but this worker speaks {PROTOCOL}")
        if hello.drafter != own.drafter:
            raise Refused(f"this worker runs drafter {own.drafter!r}, not {hello.drafter!r}")
        if hello.vocab_size != own.vocab_size:
            raise Refused(f"a vocabulary of {hello.vocab_size}, but its drafter has {own.vocab_size}")

    def _answer(self, questions: Sequence[Question]) -> list[Framed]:
        self.stats.rounds += 1
        try:
            trees, hits = self._draft(questions)
            return [(q.client, self._trees(q, trees, hits)) for q in questions]
        except Exception as error:
            self._forget(error)
            return [(q.client, self._trees(q, {}, frozenset())) for q in questions]

    def _trees(self, question: Question, trees: Mapping[str, DraftTree], hits: frozenset[str]) -> bytes:
        found, stale = {}, []
        for one in question.asked:
            if (tree := trees.get(question.rid(one.handle))) is not None:
                found[one.handle] = one.view.length, tree
            elif self._lengths.get((question.client, one.handle)) != one.view.length:
                stale.append(one.handle)
        own = sum(question.rid(one.handle) in hits for one in question.asked)
        return pack_trees(question.generation, question.number, Trees(found, tuple(stale), own))

    def _draft(self, questions: Sequence[Question]) -> tuple[dict[str, DraftTree], frozenset[str]]:
        """Drafts by rid, and those of them that had been made ahead."""
        for question in questions:
            for update in question.updates:
                self._apply(question.client, update)
        views = [replace(one.view, rid=q.rid(one.handle)) for q in questions for one in q.asked]
        if not views:
            return {}, frozenset()
        drafter = self._drafter
        trees = dict(drafter.collect(drafter.begin(views), float("inf")))
        self.stats.drafts += len(trees)
        if not isinstance(drafter, Anticipating):
            return trees, frozenset()
        self.stats.hits += len(drafter.hits)
        if self._rhythm.worth_while(len(trees), len(drafter.hits)):
            self._ahead = drafter.anticipate()
        return trees, drafter.hits

    def _apply(self, client: int, update: Update) -> None:
        key = client, update.handle
        rid = _rid(*key)
        if update.change is Change.RELEASE:
            self._release(*key)
        elif update.change is Change.BEGIN:
            self._drafter.catch_up(rid, update.tokens, update.salt)
            self._lengths[key] = len(update.tokens)
        elif self._lengths.get(key) == update.length:
            self._drafter.commit(rid, update.tokens)
            self._lengths[key] = update.length + len(update.tokens)
        if self._drafter.length(rid) is None:  # it made room for others
            self._lengths.pop(key, None)

    def _release(self, client: int, handle: int) -> None:
        self._lengths.pop((client, handle), None)
        self._drafter.release(_rid(client, handle))

    def _forget(self, error: Exception) -> None:
        """A pass failed, for want of memory perhaps: begin again with nothing. The clients catch up."""
        log.error("the draft model failed (%s); its sequences begin again\n%s", *described(error))
        self.stats.failures += 1
        self._ahead = None
        for key in list(self._lengths):
            self._release(*key)
        gc.collect()


def _rid(client: int, handle: int) -> str:
    return f"{client}/{handle}"
