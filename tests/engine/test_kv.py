"""Blocks: nothing lost, nothing shared that should not be, cached content found again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gammaray.engine.kv import BlockTable, KVCache, chain_hashes

BLOCK = 4


def filled(cache: KVCache, tokens: list[int], salt: bytes = b"") -> BlockTable:
    table = BlockTable(salt=salt)
    cache.attach(table, tokens)
    assert cache.grow(table, len(tokens))
    cache.commit(table, tokens, len(tokens) - 1)
    return table


def test_a_second_sequence_shares_the_full_blocks_of_its_prefix() -> None:
    cache = KVCache(8, BLOCK)
    first = filled(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = BlockTable()
    cache.attach(second, [1, 2, 3, 4, 5, 6, 7, 8, 10])
    assert second.blocks == first.blocks[:2]
    assert second.computed == 8


def test_the_last_token_is_never_cached_because_its_logits_are_needed() -> None:
    cache = KVCache(8, BLOCK)
    filled(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    again = BlockTable()
    cache.attach(again, [1, 2, 3, 4, 5, 6, 7, 8])
    assert again.computed == 4


def test_tenants_do_not_share_blocks() -> None:
    cache = KVCache(8, BLOCK)
    filled(cache, list(range(9)), salt=b"one")
    other = BlockTable(salt=b"two")
    cache.attach(other, list(range(9)))
    assert other.computed == 0


def test_a_block_is_found_only_behind_the_same_prefix() -> None:
    tail = [5, 6, 7, 8]
    assert chain_hashes([1, 2, 3, 4, *tail], BLOCK, b"", [])[1] != chain_hashes(tail, BLOCK, b"", [])[0]


def test_hashing_goes_on_where_it_stopped() -> None:
    tokens = list(range(12))
    whole = chain_hashes(tokens, BLOCK, b"s", [])
    assert whole[1:] == chain_hashes(tokens, BLOCK, b"s", whole[:1])


def test_the_least_recently_used_content_is_evicted_first() -> None:
    cache = KVCache(4, BLOCK)
    old, new = [1] * 5, [2] * 5
    for tokens in (old, new):
        cache.free(filled(cache, tokens))
    assert cache.grow(BlockTable(), 3 * BLOCK)  # the two free blocks and the oldest cached one
    survivor, victim = BlockTable(), BlockTable()
    cache.attach(survivor, new)
    cache.attach(victim, old)
    assert (survivor.computed, victim.computed) == (4, 0)


def test_of_one_sequence_the_later_blocks_are_evicted_first() -> None:
    """The beginning of a prompt is what others share."""
    cache = KVCache(4, BLOCK)
    prompt = list(range(13))
    cache.free(filled(cache, prompt))
    assert cache.grow(BlockTable(), 2 * BLOCK)  # the free block and one of the three cached ones
    again = BlockTable()
    cache.attach(again, prompt)
    assert again.computed == 8


def test_growing_beyond_the_pool_changes_nothing() -> None:
    cache = KVCache(2, BLOCK)
    table = BlockTable()
    assert not cache.grow(table, 3 * BLOCK)
    assert table.blocks == []
    assert cache.pool.available == 2


def test_commit_gives_the_blocks_of_a_rejected_tree_back() -> None:
    cache = KVCache(8, BLOCK)
    table = filled(cache, [1, 2, 3])
    assert cache.grow(table, 3 + 20)
    cache.commit(table, [1, 2, 3, 4], 3)
    assert len(table.blocks) == 1
    assert cache.pool.used == 1


@pytest.mark.parametrize("slots, blocks", [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_blocks_for(slots: int, blocks: int) -> None:
    assert KVCache(1, BLOCK).blocks_for(slots) == blocks


class Tables(RuleBasedStateMachine):
    """Any order of attach, grow, commit and free keeps the books."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(6, BLOCK)
        self.live: list[BlockTable] = []

    @rule(target=tables, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def begin(self, tokens: list[int]) -> tuple[BlockTable, list[int]]:
        table = BlockTable()
        self.cache.attach(table, tokens)
        self.live.append(table)
        return table, tokens

    @rule(state=tables, nodes=st.integers(0, 12), accepted=st.integers(0, 3))
    def decode(self, state: tuple[BlockTable, list[int]], nodes: int, accepted: int) -> None:
        table, tokens = state
        if self.cache.grow(table, len(tokens) + nodes):
            accepted = min(accepted, nodes)
            computed = len(tokens) + accepted
            tokens.extend([1] * (accepted + 1))
            self.cache.commit(table, tokens, computed)

    @rule(state=consumes(tables))
    def end(self, state: tuple[BlockTable, list[int]]) -> None:
        self.cache.free(state[0])
        self.live.remove(state[0])

    @invariant()
    def references_are_the_tables_that_hold_a_block(self) -> None:
        held = Counter(block for table in self.live for block in table.blocks)
        assert self.cache.pool.used == len(held)
        assert all(self.cache.pool._references[block] == count for block, count in held.items())

    @invariant()
    def shared_blocks_are_full_and_hashed(self) -> None:
        for table in self.live:
            assert len(table.hashes) <= table.computed // BLOCK <= len(table.blocks)

    def teardown(self) -> None:
        for table in self.live:
            self.cache.free(table)
        assert self.cache.pool.used == 0


TestTables = Tables.TestCase
