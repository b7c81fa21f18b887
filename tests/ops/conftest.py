from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shardline.runtime.ops import dispatch

BEST_ISA = dispatch.isa()


@pytest.fixture(params=dispatch.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with the kernels of every ISA of this CPU."""
    dispatch.set_isa(request.param)
    yield request.param
    dispatch.set_isa(BEST_ISA)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    dispatch.set_num_threads(2)
    yield
    dispatch.set_num_threads(1)
