"""Fixtures of the tests that `test_ops.py` takes from elsewhere."""

from __future__ import annotations

import pytest
import torch

from shardline.weights.base import WeightFormat, weight_format


@pytest.fixture
def isa() -> str:
    """In place of the CPU's kernel paths: these tests have one."""
    return "torch"


@pytest.fixture(params=[None, torch.int8], ids=["plain", "int8"])
def stored(request: pytest.FixtureRequest) -> torch.dtype | None:
    return request.param


@pytest.fixture(params=["plain", "int8", "int8_fast", "int4_fast", "fp8"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def form(name: str) -> WeightFormat:
    return weight_format(name)
