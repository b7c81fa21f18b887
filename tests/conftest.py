"""Options of the suite, fixtures of the tests of kernels, and Triton's interpreter.

Triton decides as it is imported, and as kernels are, whether they run in its interpreter; others import it too
(transformers does), so it comes first. Children decide anew.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest

os.environ["TRITON_INTERPRET"] = "1"
import triton.experimental.gluon
import triton.language  # noqa: F401

import shardline.runtime.machines.cuda.machine  # noqa: F401

del os.environ["TRITON_INTERPRET"]

import torch

from shardline import _cpu, lifeline
from tests.forks import ForkServer

hypothesis.settings.register_profile("suite", deadline=None)  # a busy machine is no mistake
hypothesis.settings.load_profile("suite")
torch.set_num_threads(1)  # the oracles are small, and workers of the suite share the cores
BEST_ISA = _cpu.isa()

collect_ignore = ["clients"]  # they have an environment of their own, see `make clients`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="exactness: the full product of the axes instead of a pairwise sample",
    )


def pytest_collection() -> None:
    """Imports make many objects, none of them garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What has been imported stays: the garbage collector need not look at it again and again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(params=_cpu.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with the kernels of every ISA of this CPU."""
    _cpu.set_isa(request.param)
    yield request.param
    _cpu.set_isa(BEST_ISA)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    _cpu.set_num_threads(2)
    yield
    _cpu.set_num_threads(1)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """A fork server that engines and ranks may share."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def forked_engines(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and ranks start as forks: they need not import torch each.

    For tests of answers and failures. Tests of starts and ends do without.
    """
    monkeypatch.setattr(lifeline, "start_process", fork_server.start_process)
