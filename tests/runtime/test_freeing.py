"""A closed engine gives its memory back at once: nothing in it refers to itself, so it need not wait for the garbage
collector, which counts objects and not bytes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shardline.engine.executor.uni import UniExecutor
from shardline.messages.request import Constraints
from shardline.runtime.features.base import RunningStep
from tests.exactness.harness import KGW, make_requests, marked, run, start_engine
from tests.models.checkpoints import make_checkpoint


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_a_closed_engine_is_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path)
    engine, executor = start_engine(model, mark=KGW)
    requests = marked(make_requests(256), KGW)  # with digests
    allowed = Constraints(allowed_token_ids=tuple(range(5, 250, 3)))
    run(engine, [msgspec.structs.replace(request, constraints=allowed) for request in requests], "together")

    assert [step for step in gc.get_objects() if isinstance(step, RunningStep)] == []
    assert isinstance(executor, UniExecutor)
    worker = executor._worker
    assert worker is not None
    parts = (engine, executor, worker, worker.runner, worker.runner._inputs, worker.stage, worker.kv_store)
    left = [weakref.ref(part) for part in parts]
    executor.close()
    del engine, executor, worker, parts
    assert [part() for part in left if part() is not None] == []
