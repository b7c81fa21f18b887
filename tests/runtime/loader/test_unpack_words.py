"""Words of a file become numbers as plain Python unpacks them, for any layout."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.kernels.unpack import unpack_words
from shardline.models.stored_layout import Codes

_BYTES = {"I32": 4, "U8": 1}


def expected(words: torch.Tensor, codes: Codes) -> torch.Tensor:
    """The numbers of each word, put into a grid one by one."""
    logical = words.T if codes.transposed else words
    of_word = {}
    for place, word in np.ndenumerate(logical.numpy()):
        bits = int(word) % (1 << 8 * _BYTES[codes.type])
        own = [bits >> codes.bits * i & (1 << codes.bits) - 1 for i in range(codes.per_word)]
        order = codes.order or range(codes.per_word)
        of_word[place] = [number for _, number in sorted(zip(order, own, strict=True))]
    rows, columns = logical.shape
    grow = (codes.per_word, 1) if codes.along == "rows" else (1, codes.per_word)
    out = torch.empty(rows * grow[0], columns * grow[1], dtype=torch.uint8)
    for (row, column), own in of_word.items():
        for i, number in enumerate(own):
            place = (row * grow[0] + i, column) if codes.along == "rows" else (row, column * grow[1] + i)
            out[place] = (number + codes.offset) % 256
    return out


@settings(max_examples=60)
@given(data=st.data())
def test_words_are_unpacked_as_the_layout_says(data: st.DataObject) -> None:
    kind, bits = data.draw(st.sampled_from([("I32", 4), ("I32", 8), ("U8", 4), ("U8", 8)]))
    along: Literal["rows", "columns"] = data.draw(st.sampled_from(("rows", "columns")))
    transposed = data.draw(st.booleans())
    plain = Codes("codes", kind, bits, along=along, transposed=transposed)
    order = data.draw(st.one_of(st.just(()), st.permutations(range(plain.per_word)).map(tuple)))
    codes = Codes("codes", kind, bits, along, transposed, order, offset=data.draw(st.sampled_from([0, 1, 128])))
    height, width = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 40))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    values = torch.from_numpy(rng.integers(0, 256, (height, (width + 2) * _BYTES[kind]), dtype=np.uint8))
    words = (values.view(torch.int32) if kind == "I32" else values)[:, 1 : 1 + width]
    wanted = expected(words, codes)
    found = torch.empty_like(wanted)
    unpack_words(words, found, codes)
    assert torch.equal(found, wanted)


def test_tensors_that_do_not_fit_are_refused() -> None:
    words, codes = torch.zeros(2, 3, dtype=torch.int32), torch.empty(2, 24, dtype=torch.uint8)
    with pytest.raises(ValueError, match="codes"):
        unpack_words(words, codes, Codes("codes", "I32", 8))
    with pytest.raises(ValueError, match="order"):
        unpack_words(words, codes, Codes("codes", "I32", 4, order=(0, 1, 2, 3, 4, 5, 6, 6)))
    with pytest.raises((TypeError, ValueError), match="words"):
        unpack_words(words.float(), codes, Codes("codes", "I32", 4))
