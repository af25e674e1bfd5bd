"""Paged KV bookkeeping: reference counts, a content-hash prefix cache, LRU eviction, block tables.

Knows block numbers only; the tensors belong to the model runner. A sequence's *logical slot* i lies in
block `table.blocks[i // block_size]`. Committed tokens fill the slots from 0; the nodes of a draft tree
take the virtual slots behind them and are given back, or moved down, at commit.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from gammaray.types import Reuse

REMEMBERED = 8  # hashes a block of the pool: enough to see that a larger pool would have helped


class BlockPool:
    """Blocks with reference counts. A block that nobody uses but whose content is hashed stays cached
    until it is the least recently used one and somebody needs room."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references: Counter[int] = Counter()
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, unreferenced; oldest first

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - self.available

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks of undefined content, or None (and no change) when they are not there."""
        if count > self.available:
            return None
        return [self._take() for _ in range(count)]

    def share(self, block_hash: bytes) -> int | None:
        """The cached block of this content with one more reference, or None."""
        block = self._by_hash.get(block_hash)
        if block is not None:
            self._references[block] += 1
            self._idle.pop(block, None)
        return block

    def register(self, block: int, block_hash: bytes) -> None:
        """Offer a full, committed block to later sequences. The first block of a content stays the one."""
        if block_hash not in self._by_hash and block not in self._hash_of:
            self._by_hash[block_hash] = block
            self._hash_of[block] = block_hash

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference each; later blocks of a table come first, so that prefixes live longest."""
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            del self._references[block]
            if block in self._hash_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def audit(self, tables: Iterable[BlockTable]) -> str | None:
        """Which of the books is wrong, if these are all tables: for the state oracle."""
        held = Counter(block for table in tables for block in table.blocks)
        if held != self._references:
            return "KV block references"
        everywhere = sorted([*self._free, *self._idle, *held])
        return None if everywhere == list(range(self.num_blocks)) else "free KV blocks"

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._by_hash[self._hash_of.pop(block)]
        self._references[block] = 1
        return block


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks; `computed` leading slots hold committed KV."""

    salt: bytes = b""  # sequences share cached blocks only under an equal salt (the tenant)
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of the leading full blocks
    computed: int = 0
    seen: int = 0  # leading slots whose content was in the pool once; `computed` of these still were


class KVCache:
    """Block tables over one pool. Used by the target and by every drafter that has KV of its own."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # hashes of what was in the pool, oldest first
        self._reuse = Reuse()

    @property
    def capacity(self) -> int:
        """Slots of the whole pool."""
        return self.pool.num_blocks * self.block_size

    def attach(self, table: BlockTable, tokens: Sequence[int], most: int | None = None) -> None:
        """Fill an empty table with the cached blocks of the longest known prefix of `tokens`.

        The last token is never taken from the cache: its logits are needed. `most`: tokens to take at most.
        """
        if not self.prefix_cache:
            return
        hashes = chain_hashes(tokens[:-1], self.block_size, table.salt, [])
        for block_hash in hashes if most is None else hashes[: most // self.block_size]:
            block = self.pool.share(block_hash)
            if block is None:
                break
            table.blocks.append(block)
            table.hashes.append(block_hash)
        table.computed = len(table.blocks) * self.block_size
        lost = takewhile(self._seen.__contains__, hashes[len(table.blocks) :])
        table.seen = table.computed + sum(1 for _ in lost) * self.block_size

    def count_reuse(self, table: BlockTable) -> None:
        """This table is in use from now on, with what `attach` found for it."""
        self._reuse += Reuse(table.seen, table.computed)
        for block_hash in table.hashes:
            self._remember(block_hash)

    def take_reuse(self) -> Reuse:
        """Since this was asked last."""
        reuse, self._reuse = self._reuse, Reuse()
        return reuse

    def grow(self, table: BlockTable, slots: int) -> bool:
        """Make room for `slots` logical slots; False (and no change) when the pool cannot."""
        missing = self.blocks_for(slots) - len(table.blocks)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        table.blocks += blocks
        return True

    def commit(self, table: BlockTable, tokens: Sequence[int], computed: int, ahead: int = 0) -> None:
        """Slots below `computed` hold the KV of `tokens` now; blocks behind the last token, and `ahead`
        slots more, go back."""
        table.computed = computed
        keep = self.blocks_for(len(tokens) + ahead)
        self.pool.release(table.blocks[keep:])
        del table.blocks[keep:]
        if not self.prefix_cache:
            return
        full = computed // self.block_size
        known = len(table.hashes)
        if full > known:
            table.hashes += chain_hashes(
                tokens[: full * self.block_size], self.block_size, table.salt, table.hashes
            )
            for index in range(known, full):
                self.pool.register(table.blocks[index], table.hashes[index])
                self._remember(table.hashes[index])

    def _remember(self, block_hash: bytes) -> None:
        self._seen[block_hash] = None
        self._seen.move_to_end(block_hash)
        if len(self._seen) > REMEMBERED * self.pool.num_blocks:
            self._seen.popitem(last=False)

    def free(self, table: BlockTable) -> None:
        """Give everything back; the table can be attached again."""
        self.pool.release(table.blocks)
        table.blocks, table.hashes, table.computed, table.seen = [], [], 0, 0

    def slots(self, table: BlockTable, logical: Iterable[int]) -> list[int]:
        """Physical slots of logical ones."""
        size = self.block_size
        return [table.blocks[i // size] * size + i % size for i in logical]

    def blocks_for(self, slots: int) -> int:
        return -(-slots // self.block_size)


def chain_hashes(tokens: Sequence[int], block_size: int, salt: bytes, known: Sequence[bytes]) -> list[bytes]:
    """Hashes of the full blocks behind the `known` ones, each over its tokens and all before them.

    BLAKE2b, not hash(): a tenant must not be able to build a prompt that collides with another's.
    """
    hashes: list[bytes] = []
    previous = known[-1] if known else salt
    for start in range(len(known) * block_size, len(tokens) - block_size + 1, block_size):
        content = array("q", tokens[start : start + block_size]).tobytes()
        digest = hashlib.blake2b(content, digest_size=16, key=b"kv")
        digest.update(len(previous).to_bytes(2, "little") + previous)
        previous = digest.digest()
        hashes.append(previous)
    return hashes
