"""A few seconds of `tests.router.soak`; `make soak` runs it for ten minutes."""

from __future__ import annotations

import asyncio

import pytest

from tests.router.soak import soak


@pytest.mark.slow
def test_a_few_seconds_of_chaos() -> None:
    report = asyncio.run(soak(2.0, seed=1))
    assert not report.problems(), report
