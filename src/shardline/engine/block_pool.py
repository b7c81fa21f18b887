"""The pool of KV blocks: who holds which, which are free, and what the free ones still contain."""

from __future__ import annotations

from collections import OrderedDict

NULL_BLOCK = 0
"""Stands in block tables where there is nothing to read; never handed out."""


class BlockPool:
    """Reference-counted blocks 1 .. num_blocks - 1, every operation O(1).

    A block that nobody holds is free. A free block keeps its published content, and can be shared again, until it is
    taken for something else: blocks without content are taken first, then the least recently released.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"the KV cache needs at least 2 blocks (one is reserved), got {num_blocks}")
        self.num_usable = num_blocks - 1
        self._references = [0] * num_blocks
        self._contents: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `take_block` can hand out, cached content or not."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_usable - self.num_free

    def num_references(self, block: int) -> int:
        """How many hold the block."""
        return self._references[block]

    def take_block(self) -> int:
        """A block without content, held once by the caller. There must be a free one."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            content = self._contents[block]
            assert content is not None
            del self._published[content]
            self._contents[block] = None
        self._references[block] = 1
        return block

    def share_block(self, block: int) -> None:
        """Hold a published block once more."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release_block(self, block: int) -> None:
        """Undo one `take_block` or `share_block`. Of blocks released one after another, the first is re-used first."""
        references = self._references[block] - 1
        assert references >= 0, "a free block was released"
        self._references[block] = references
        if references == 0:
            if self._contents[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def publish_block(self, block: int, content: bytes) -> None:
        """Make a held block findable by its content. If another block has the same
        content already, that one stays the one to be found."""
        assert self._references[block] > 0, "a free block was published"
        assert self._contents[block] is None, "a block was published twice"
        if content not in self._published:
            self._published[content] = block
            self._contents[block] = content

    def find_block(self, content: bytes) -> int | None:
        """The block with this content, held or free."""
        return self._published.get(content)
