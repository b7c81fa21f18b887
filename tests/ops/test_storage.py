"""Memory on huge pages is memory like any other."""

from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops.storage import streamed_empty


@pytest.mark.parametrize("shape", [(3, 5), (1 << 20, 3), (7, 1 << 18, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_it_holds_what_is_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = streamed_empty(shape, dtype)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0
    tensor.fill_(3)
    other = streamed_empty(shape, dtype).fill_(4)
    assert bool((tensor == 3).all())
    assert bool((other == 4).all())
