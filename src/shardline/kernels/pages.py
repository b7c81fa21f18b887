"""The order of elements in the pages of a KV cache, and their way into the logical order and back.

Every back end stores a page as its products read it. Whatever moves pages between unlike readers, such as hosts of
unlike ISA, tiers and tests, goes through `tokens_of` and `pages_of`.

A page holds the keys or values of one block and one KV head, logically [block_size, dim]. On a CPU its tokens are cut
into panels of 16. The keys of a panel are [words of a key][16 tokens], and its values [words of 16 tokens][dim]. A word
holds the elements that one lane of a product multiplies: one in the order "words", two in "pairs".
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

PageOrder = Literal["tokens", "words", "pairs"]
"""How a page lies: "tokens" is the logical order, [block_size, dim]."""

PageKind = Literal["keys", "values"]
"""What a page holds; latents count as keys, and scales always have the logical order."""

PANEL_TOKENS = 16
"""Tokens of a panel; the block size is a multiple."""


def tokens_of(pages: Tensor, kind: PageKind, order: PageOrder) -> Tensor:
    """The logical form [..., block_size, dim] of pages of that shape whose elements lie in `order`.

    It is contiguous, and may share memory with `pages`.
    """
    if order == "tokens":
        return pages.contiguous()
    *leading, block_size, dim = pages.shape
    word = _word_size(order, block_size, dim)
    panels = (*leading, block_size // PANEL_TOKENS)
    if kind == "keys":
        tokens = pages.reshape(*panels, dim // word, PANEL_TOKENS, word).transpose(-3, -2)
    else:
        tokens = pages.reshape(*panels, PANEL_TOKENS // word, dim, word).transpose(-2, -1)
    return tokens.reshape(pages.shape).contiguous()


def pages_of(tokens: Tensor, kind: PageKind, order: PageOrder) -> Tensor:
    """The inverse of `tokens_of`: pages in `order`, for their logical form [..., block_size, dim]."""
    if order == "tokens":
        return tokens.contiguous()
    *leading, block_size, dim = tokens.shape
    word = _word_size(order, block_size, dim)
    panels = (*leading, block_size // PANEL_TOKENS)
    if kind == "keys":
        pages = tokens.reshape(*panels, PANEL_TOKENS, dim // word, word).transpose(-3, -2)
    else:
        pages = tokens.reshape(*panels, PANEL_TOKENS // word, word, dim).transpose(-2, -1)
    return pages.reshape(tokens.shape).contiguous()


def _word_size(order: PageOrder, block_size: int, dim: int) -> int:
    word = 2 if order == "pairs" else 1
    if block_size % PANEL_TOKENS or dim % word:
        raise ValueError(f"no page of {block_size} tokens with {dim} elements each has the order {order!r}")
    return word
