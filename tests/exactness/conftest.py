"""Ranks are threads here, up to 24 of them. They hand the interpreter over at every exchange, so none may hold it for
long, and a hand-over costs least if they share a core."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _fast_handovers() -> Iterator[None]:
    interval, cpus = sys.getswitchinterval(), os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    sys.setswitchinterval(1e-4)
    os.sched_setaffinity(0, {sorted(cpus)[worker % len(cpus)]})
    yield
    os.sched_setaffinity(0, cpus)
    sys.setswitchinterval(interval)
