"""The order of pages, against the formula for each element's place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardline.kernels.pages import PageKind, PageOrder, pages_of, tokens_of


def place_of(kind: PageKind, order: PageOrder, dim: int, token: int, element: int) -> int:
    """Where an element lies in its page."""
    word = {"tokens": 1, "words": 1, "pairs": 2}[order]
    if order == "tokens":
        return token * dim + element
    panel, token = token // 16 * 16 * dim, token % 16
    if kind == "keys":
        return panel + (element // word * 16 + token) * word + element % word
    return panel + (token // word * dim + element) * word + token % word


@st.composite
def logical_pages(draw: st.DrawFn) -> Tensor:
    leading = draw(st.lists(st.integers(1, 3), max_size=2))
    shape = (*leading, 16 * draw(st.integers(1, 3)), 2 * draw(st.integers(1, 9)))
    return torch.arange(torch.Size(shape).numel()).view(shape)


@given(tokens=logical_pages(), kind=st.sampled_from(["keys", "values"]), order=st.sampled_from(["words", "pairs"]))
def test_every_element_has_its_place(tokens: Tensor, kind: PageKind, order: PageOrder) -> None:
    pages = pages_of(tokens, kind, order)
    assert pages.shape == tokens.shape
    *_, block_size, dim = tokens.shape
    for page, logical in zip(pages.view(-1, block_size * dim), tokens.view(-1, block_size, dim), strict=True):
        places = [[place_of(kind, order, dim, token, d) for d in range(dim)] for token in range(block_size)]
        assert torch.equal(page[torch.tensor(places)], logical)
    assert torch.equal(tokens_of(pages, kind, order), tokens)


def test_the_order_of_tokens_is_the_logical_one():
    tokens = torch.arange(48.0).view(16, 3)
    for same in (pages_of(tokens, "keys", "tokens"), tokens_of(tokens, "values", "tokens")):
        assert torch.equal(same, tokens)


@pytest.mark.parametrize(("block_size", "dim", "order"), [(8, 4, "words"), (24, 4, "pairs"), (16, 3, "pairs")])
def test_sizes_without_an_order_are_refused(block_size, dim, order):
    for convert in (pages_of, tokens_of):
        with pytest.raises(ValueError, match=f"no page of {block_size} tokens with {dim} elements each"):
            convert(torch.zeros(2, block_size, dim), "keys", order)
