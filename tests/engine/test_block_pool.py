"""BlockPool against a model that is too simple to be wrong."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shardline.engine.block_pool import NULL_BLOCK, BlockPool

NUM_BLOCKS = 7


class PoolMachine(RuleBasedStateMachine):
    """References as a list of holders, free blocks as a list in order of release."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.pool.on_evict = self.note_eviction
        self.evicted: list[tuple[bytes, int]] = []
        self.held: list[int] = []
        self.content: dict[int, bytes] = {}
        self.free = list(range(1, NUM_BLOCKS))

    def note_eviction(self, content: bytes, block: int) -> None:
        assert self.pool.find_block(content) == block, "it is told before the content is lost"
        assert self.pool.num_references(block) == 0, "it is told before the block is handed out"
        self.evicted.append((content, block))

    @precondition(lambda self: self.free)
    @rule()
    def take(self) -> None:
        self.evicted.clear()
        block = self.pool.take_block()
        blank = [free for free in self.free if free not in self.content]
        assert block in blank if blank else block == self.free[0]
        assert self.evicted == ([] if blank else [(self.content[block], block)])
        self.free.remove(block)
        self.content.pop(block, None)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.release_block(block)
        self.held.remove(block)
        if block not in self.held:
            self.free.append(block)

    @rule(data=st.data(), content=st.sampled_from([b"a", b"b", b"c"]))
    def publish(self, data: st.DataObject, content: bytes) -> None:
        blank = sorted({block for block in self.held if block not in self.content})
        if blank:
            block = data.draw(st.sampled_from(blank))
            self.pool.publish_block(block, content)
            if content not in self.content.values():
                self.content[block] = content

    @rule(content=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def share(self, content: bytes) -> None:
        expected = next((block for block, known in self.content.items() if known == content), None)
        block = self.pool.find_block(content)
        assert block == expected
        if block is not None:
            self.pool.share_block(block)
            self.held.append(block)
            if block in self.free:
                self.free.remove(block)

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_used == len(set(self.held))
        assert NULL_BLOCK not in self.held
        for block in range(1, NUM_BLOCKS):
            assert self.pool.num_references(block) == self.held.count(block)


TestPool = PoolMachine.TestCase


def test_releasing_a_free_block_is_a_bug() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError):
        pool.release_block(1)


def test_a_pool_needs_a_block_beside_the_null_block() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1)


def test_a_block_that_is_shared_again_and_again_is_reused_last() -> None:
    pool = BlockPool(4)
    blocks = [pool.take_block() for _ in range(3)]
    for block in blocks:
        pool.publish_block(block, b"%d" % block)
        pool.release_block(block)
    for _ in range(30):
        pool.share_block(blocks[0])
        pool.release_block(blocks[0])
    assert [pool.take_block() for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]
    assert pool.num_free == 0
