"""A token that is drafted again and again, never accepted, and searched for in whatever is left of a run.

The engine parts are imported by Ray's processes (see `soak.surroundings`): pickled by value, the word would
be in Ray's own tables.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import tempfile
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gammaray.actors.reach import reach
from gammaray.actors.served import Served
from gammaray.actors.target import Surroundings
from gammaray.config import Config
from gammaray.engine.batch import Row
from gammaray.engine.drafters.base import Drafter, DraftTree, DraftView, Ticket
from gammaray.engine.drafters.switch import TenantDrafter
from gammaray.engine.engine import Engine, EngineOptions, StepOutput
from gammaray.engine.service import AsyncEngine
from gammaray.engine.sim import Language, SimDevice, StepCost
from gammaray.types import GenerateRequest, StepReport, TokenChunk

from .draft_process import SleepClock
from .serving import ByteTokenizer

WORD, ID = "quetzalcoatlus", 113_797  # of the token
VOCAB, LETTERS, LENGTH = ID + 1, 26, 1024
NEVER = -1e9  # a logit
PASS_S = 0.002
DECOY = "pterodactylus"  # is leaked on purpose, so that it is seen which sinks are searched
FORWARD_FAULT, STEP_FAULT, STREAM_FAULT = b"#$%"  # in a prompt: what fails there, and says the canary
SPOILT_EVERY = 5  # drafts of a worker, and reports for the listener
NEAR, LOUD, FAR = "near", "loud", "far"  # drafters: one works, one fails, one is in a draft worker

_FORMS = (
    re.escape(WORD.encode()),
    rb"(?<![\d.])%d(?!\d)" % ID,  # not in a larger number, nor behind its point
    re.escape(struct.pack("<q", ID)),
    re.escape(struct.pack("<d", ID)),
    re.escape(struct.pack("<ii", ID, ID)),  # a draft of it has it twice
    re.escape(b"J" + struct.pack("<i", ID)),  # pickle
    re.escape(b"\xce" + struct.pack(">I", ID)),  # MessagePack
)
_CANARY = re.compile(b"|".join(_FORMS))


def sings(data: bytes) -> bool:
    """The canary's text or id is in there, in any of the forms that a program may write them in."""
    return _CANARY.search(data) is not None


def around(data: bytes, most: int = 120) -> list[bytes]:
    """Where it is, for whoever has to find out why."""
    return [data[max(0, m.start() - most) : m.end() + most] for m in _CANARY.finditer(data)]


def files(*folders: Path) -> Iterator[tuple[str, bytes]]:
    """Every file below, with its name."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                yield str(path.relative_to(folder)), path.read_bytes()


def song() -> RuntimeError:
    """An error whose message must not get far."""
    return RuntimeError(f"cannot verify {WORD} ({ID})")


# What runs in Ray's processes -------------------------------------------------------------------------


class Shy(Language):
    """A language of letters in a large vocabulary."""

    def __init__(self) -> None:
        super().__init__(LETTERS, LENGTH)
        self.vocab_size = VOCAB

    def logits(self, digests: Sequence[int]) -> Tensor:
        return torch.nn.functional.pad(super().logits(digests), (0, VOCAB - LETTERS), value=NEVER)


class Names:
    """Of tokens, for the engine: what it says is letters, but the canary's text would be seen."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(WORD if i == ID else chr(ord("a") + i % LETTERS) for i in ids)


class NamedTokenizer(ByteTokenizer):
    """The same for the ingress, and bytes for prompts."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(WORD if i == ID else chr(i) if i > LETTERS else chr(ord("a") + i) for i in ids)

    def convert_ids_to_tokens(self, ids: int) -> str:
        return WORD if ids == ID else f"<{ids}>"

    def get_vocab(self) -> dict[str, int]:
        return {**super().get_vocab(), WORD: ID}


class CanaryDrafter:
    """Proposes the canary, level by level."""

    vocab_size: int | None = VOCAB

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views))

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        return {v.rid: DraftTree((ID,) * v.depth, tuple(range(-1, v.depth - 1))) for v in ticket.views}

    def commit(self, rid: str, tokens: Sequence[int], features: Tensor | None = None) -> None:
        if rid in self._lengths:
            self._lengths[rid] += len(tokens)

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        self._lengths[rid] = len(tokens)

    def release(self, rid: str) -> None:
        self._lengths.pop(rid, None)

    def length(self, rid: str) -> int | None:
        return self._lengths.get(rid)


class LoudDrafter(CanaryDrafter):
    """Each `every`th time that it is asked for drafts it fails instead."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self._every, self._asked = every, 0

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        self._asked += 1
        if self._asked % self._every == 0:
            raise song()
        return super().collect(ticket, deadline)


class LoudDevice(SimDevice):
    def forward(self, rows: Sequence[Row]) -> Tensor:
        if any(FORWARD_FAULT in row.pending for row in rows):
            raise song()
        return super().forward(rows)


class LoudEngine(Engine):
    def step(self) -> StepOutput:
        output = super().step()
        if any(STEP_FAULT in sequence.request.prompt for sequence in self.scheduler):
            raise song()
        return output


class LoudService(AsyncEngine):
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        async for chunk in super().generate(request):
            yield chunk
            if STREAM_FAULT in request.prompt:
                raise song()


def leak(who: str) -> None:
    """Says the decoy wherever a process can say something."""
    logging.getLogger("gammaray.decoy").error("log of %s: %s", who, DECOY)
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.write(number, f"{name} of {who}: {DECOY}\n".encode())
    Path(tempfile.mkdtemp()).joinpath("decoy").write_text(f"file of {who}: {DECOY}")


def engine(config: Config, surroundings: Surroundings) -> AsyncEngine:
    """As `local_engine` makes it, of parts that fail where a prompt asks for it."""
    leak("replica")
    pools = reach(surroundings.pools, surroundings.resolve)
    far = {tenant: make(VOCAB) for (tenant, _), make in pools.drafters.items()}
    drafters: dict[str, Drafter] = {NEAR: CanaryDrafter(), LOUD: LoudDrafter(1)}
    made = LoudEngine(
        LoudDevice(Shy(), SleepClock(), StepCost(((1_000_000, PASS_S),)), num_blocks=256),
        Names(),
        drafters=drafters | {FAR: TenantDrafter(far, VOCAB)},
        options=EngineOptions(name=config.target.model, max_batch=8),
    )

    def listen(report: StepReport) -> None:
        surroundings.listener(report)
        if report.step % SPOILT_EVERY == 0:
            raise song()

    return LoudService(made, listen, links=pools.links)


def link(config: Config, drafter: str) -> Served:
    """As `local_link` makes it."""
    leak("worker")
    return Served(drafter, LoudDrafter(SPOILT_EVERY), VOCAB)


def tokenizer(model: str) -> NamedTokenizer:
    leak("ingress")
    return NamedTokenizer()
