"""A host of the demo model as its node describes it, and a free port."""

from __future__ import annotations

import socket

import pytest
from msgspec.structs import replace

from shardline.cluster.describe import describe_node
from shardline.config.engine import EngineConfig
from shardline.messages.node import Join


@pytest.fixture(autouse=True)
def _own_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node adopts its head's kernel path in the environment, which later tests must not see."""
    monkeypatch.setenv("SHARDLINE_ISA", "")


@pytest.fixture(scope="session")
def own() -> Join:
    config = EngineConfig.from_options(model="demo", device="cpu", nnodes=3, master_addr="127.0.0.1")
    join = describe_node(config, "10.0.0.1")
    cpu = replace(join.host.devices[0], capability="avx512")
    isas = ("portable", "avx2", "avx512")
    return replace(join, isas=isas, host=replace(join.host, name="one", devices=(cpu,)))


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
