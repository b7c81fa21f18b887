"""What a file for weights gives back, whatever lies in memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardline import _cpu
from shardline.runtime.machines.host.weight_file import BLOCK, WeightFile

BLOCK_WORDS = BLOCK // 2


@st.composite
def words(draw: st.DrawFn) -> Tensor:
    """16-bit words that are weights for the most part: [a multiple of BLOCK_WORDS], int16."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    count = BLOCK_WORDS * draw(st.integers(1, 12))
    scale = 2.0 ** draw(st.integers(-140, 120))
    weights = (torch.randn(count, generator=generator) * scale).to(torch.bfloat16).view(torch.int16)
    others = torch.randint(-(2**15), 2**15, (count,), generator=generator, dtype=torch.int16)
    chosen = torch.rand(count, generator=generator)
    weights = torch.where(chosen < draw(st.sampled_from([0.0, 0.001, 0.05, 1.0])), others, weights)
    return torch.where(chosen > 1 - draw(st.sampled_from([0.0, 0.01, 0.9, 1.0])), 0, weights)


@given(words())
def test_shortened_exponents_come_back(weights: Tensor) -> None:
    memory = weights.view(torch.uint8)
    stored = torch.full_like(memory, 255)
    count = _cpu.shorten_exponents(memory, stored)
    assert count % BLOCK == 0
    assert count <= len(memory) * 7 / 8
    exponents = torch.bincount(weights.to(torch.int32) >> 7 & 255, minlength=256)[1:]
    kept = int(exponents.unfold(0, 15, 1).sum(1).max()) + int((weights & 0x7F80 == 0).sum())
    needed = 8 + len(memory) * 3 // 4 + 4 * (len(weights) - kept)
    assert count == (-(-needed // BLOCK) * BLOCK if -(-needed // BLOCK) * BLOCK <= len(memory) * 7 // 8 else 0)
    for isa in _cpu.available_isas() if count else ():
        here = _cpu.isa()
        _cpu.set_isa(isa)
        try:
            read = torch.full_like(memory, 170)
            read[len(read) - count :] = stored[:count]
            _cpu.restore_exponents(read, count)
        finally:
            _cpu.set_isa(here)
        assert torch.equal(read, memory), isa


@given(words(), st.data())
def test_what_is_no_shortened_exponents_is_refused_or_restored_within_its_memory(
    weights: Tensor, data: st.DataObject
) -> None:
    memory = weights.view(torch.uint8).clone()
    for stored_size in (0, len(memory), len(memory) + BLOCK, data.draw(st.integers(0, len(memory)))):
        try:
            _cpu.restore_exponents(memory, stored_size)
        except ValueError as error:
            assert "no shortened exponents" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("dtype", "shorten", "share"),
    [(torch.bfloat16, True, 0.753), (torch.bfloat16, False, 1.0), (torch.float32, True, 1.0)],
)
def test_a_file_gives_back_what_was_written(dtype: torch.dtype, shorten: bool, share: float, tmp_path: Path) -> None:
    file = WeightFile(tmp_path, 1 << 30)
    length = (8 << 20) + 32 * BLOCK  # one chunk and a part
    memory = mmap.mmap(-1, length + 2 * BLOCK)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    weights = torch.randn(len(whole) // dtype.itemsize, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole.copy_(weights.view(torch.uint8))
    expected = whole.clone()
    extents = [file.append(memory, BLOCK, length, shorten=shorten) for _ in range(2)]
    file.flush()
    assert file.num_bytes == pytest.approx(2 * length * share, rel=0.01)
    whole[BLOCK : BLOCK + length] = 0
    file.read(extents[1], "weights")
    assert torch.equal(whole, expected)
