"""Which replica a request goes to: the one that has its prefix in the KV cache, unless that one is too busy.

An ingress remembers where it sent the first blocks of each prompt. Stale memories (a replica evicted the
prefix, or came back without it) cost a prefill, as any other choice would.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

BLOCK = 64  # tokens
DEPTH = 32  # blocks of a prompt that are looked at
BLOCKS = 4096  # remembered of each tenant, so that none makes others forget
TENANTS = 256  # remembered, least recently seen ones go first
FACTOR, SLACK = 2, 4  # see `choose`

Chain = tuple[bytes, ...]


def chain(prompt: Sequence[int]) -> Chain:
    """A hash for each of the first whole blocks of token ids, which is that of all tokens up to its end."""
    data = array("Q", prompt[: BLOCK * DEPTH]).tobytes()
    size, found, last = BLOCK * array("Q").itemsize, [], b""
    for end in range(size, len(data) + 1, size):
        last = blake2b(last + data[end - size : end], digest_size=8).digest()
        found.append(last)
    return tuple(found)


def choose(known: Mapping[int, int], load: Mapping[int, int]) -> int:
    """The replica with the longest known prefix; among equals, the one with the least load.

    `load`: open requests of each replica; `known`: blocks that those have which know any. A replica with more
    than FACTOR times the load of the least loaded one, and SLACK on top, is out: to wait there takes longer
    than a prefill elsewhere. Of two that differ by less, power-of-two choices would also take either.
    """
    most = FACTOR * min(load.values()) + SLACK
    return min(load, key=lambda one: (load[one] > most, -known.get(one, 0), load[one], one))


class Affinity:
    """Where prefixes went; an LRU for each tenant. One event loop calls it."""

    def __init__(self, blocks: int = BLOCKS, tenants: int = TENANTS) -> None:
        self._blocks, self._most = blocks, tenants
        self._tenants: OrderedDict[str, OrderedDict[bytes, frozenset[int]]] = OrderedDict()

    def send(self, tenant: str, prompt: Sequence[int], load: Mapping[int, int]) -> int:
        """The replica for this prompt, of those in `load`, which from now on counts as knowing it."""
        blocks, seen = chain(prompt), self._of(tenant)
        replica = choose(_known(blocks, seen), load)
        for block in reversed(blocks):  # a beginning is forgotten after what follows on it
            seen[block] = seen.pop(block, frozenset()) | {replica}
        while len(seen) > self._blocks:
            seen.popitem(last=False)
        return replica

    def _of(self, tenant: str) -> OrderedDict[bytes, frozenset[int]]:
        seen = self._tenants.setdefault(tenant, OrderedDict())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > self._most:
            self._tenants.popitem(last=False)
        return seen


def _known(blocks: Chain, seen: Mapping[bytes, frozenset[int]]) -> dict[int, int]:
    """How many of the blocks each replica has: one with a block has those before it, which outlive it."""
    depth: dict[int, int] = {}
    for count, block in enumerate(blocks, start=1):
        if block not in seen:
            break
        depth |= dict.fromkeys(seen[block], count)
    return depth
