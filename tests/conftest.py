"""Options of the suite, its marks by folder, and fixtures of the tests of kernels.

Torch is imported by those who use it, and Triton by the tests of its kernels, so that a unit test loads neither. Triton
decides as it is imported, and as kernels are, whether they run in its interpreter; other packages import it too
(transformers does), so the variable is set while tests are collected. Children decide anew.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from shardline import _cpu, lifeline
from tests.forks import ForkServer

if TYPE_CHECKING:
    import torch

# Hundreds of processes start here, and without bytecode each one compiles the whole source again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["TRITON_INTERPRET"] = "1"
hypothesis.settings.register_profile("suite", deadline=None)  # a busy machine is no mistake
hypothesis.settings.load_profile("suite")
BEST_ISA = _cpu.isa()

SAMPLE_CASES = 3
SAMPLE_EXAMPLES = 20

TESTS = Path(__file__).parent
MARKED_FOLDERS = {
    "e2e": "e2e",
    "exactness": "e2e",
    "faults": "e2e",
    "hostile": "e2e",
    "kernels": "slow",
    "runtime": "e2e",
    "runtime/loader": "slow",
    "runtime/machines": "slow",
    "runtime/ops": "slow",
    "sandbox": "e2e",
    "weights": "slow",
}
"""Folders below tests/ whose tests are no unit tests; of nested folders, the inner one decides."""

collect_ignore = ["clients", "real", "ui"]  # they need packages of their own, see their targets in Makefile


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="exactness: the full product of the axes instead of a pairwise sample",
    )
    parser.addoption(
        "--sample",
        action="store_true",
        help=f"of each test, at most {SAMPLE_CASES} of its cases, spread over all, and {SAMPLE_EXAMPLES} examples",
    )


@functools.cache
def mark_of(path: Path) -> str | None:
    """The mark of all tests in a file or folder below tests/."""
    own = path.relative_to(TESTS)
    return next(
        (MARKED_FOLDERS[name] for part in (own, *own.parents) if (name := part.as_posix()) in MARKED_FOLDERS), None
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests that the mark expression leaves out by their folder are not imported: most of them need torch."""
    words = [] if " or " in config.option.markexpr else config.option.markexpr.split(" and ")
    inner = [mark for folder, mark in MARKED_FOLDERS.items() if (TESTS / folder).is_relative_to(collection_path)]
    return all(f"not {mark}" in words for mark in (mark_of(collection_path), *inner)) or None


def pytest_collection() -> None:
    """Imports make many objects, none of them garbage."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--sample"):
        _sample(config, items)
    for item in items:
        if mark := mark_of(item.path):
            item.add_marker(mark)
        elif {"fork_server", "forked_engines"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("e2e")
    _spread(items)


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    sampled: set[pytest.Item] = set()
    for cases in tests.values():
        count = min(SAMPLE_CASES, len(cases))
        sampled.update(cases[n * len(cases) // count] for n in range(count))
    config.hook.pytest_deselected(items=[item for item in items if item not in sampled])
    # Those that may need transformers come first, so that the second worker need not import it.
    items[:] = sorted((item for item in items if item in sampled), key=lambda item: not _may_compare(item.path))
    for item in items:
        # The settings of a property are those of its function, the settings of a state machine those of its class.
        for owner, name in (
            (getattr(item, "obj", None), "_hypothesis_internal_use_settings"),
            (getattr(item, "cls", None), "settings"),
        ):
            own = getattr(owner, name, None)
            if isinstance(own, hypothesis.settings):
                fewer = min(own.max_examples, SAMPLE_EXAMPLES)
                setattr(owner, name, hypothesis.settings(own, max_examples=fewer))


@functools.cache
def _may_compare(path: Path) -> bool:
    """Whether the tests in a file compare something with transformers, or have it make checkpoints."""
    text = path.read_text(encoding="utf-8")
    return "transformers" in text or "tests.models" in text


def _spread(items: list[pytest.Item]) -> None:
    """Have the first worker begin with the tests that wait for long, and the second with those whose ranks spin on all
    cores: together at the end, these would slow each other down."""
    waiting, spinning, others = (
        [item for item in items if _slow_folder(item.path) == folder] for folder in ("faults", "exactness", "")
    )
    place = max(0, len(items) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) - len(waiting))
    items[:] = [*waiting, *others[:place], *spinning, *others[place:]]


@functools.cache
def _slow_folder(path: Path) -> str:
    return next((name for name in ("faults", "exactness") if path.is_relative_to(TESTS / name)), "")


def pytest_collection_finish() -> None:
    """What has been imported stays: the garbage collector need not look at it again and again."""
    os.environ.pop("TRITON_INTERPRET", None)
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """The oracles are small, and workers of the suite share the cores."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(params=_cpu.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with the kernels of every ISA of this CPU."""
    _cpu.set_isa(request.param)
    yield request.param
    _cpu.set_isa(BEST_ISA)


@pytest.fixture(params=["float32", "bfloat16"], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, request.param)
    return dtype


@pytest.fixture
def rng() -> torch.Generator:
    import torch

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
