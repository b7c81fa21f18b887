"""Servers for real clients. `make clients` runs these tests in an environment without Shardline."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from tests.e2e.serving import Server, serve

# Clients must not look for model prices, data sets or tokenizers elsewhere.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

SHARDLINE_PYTHON = os.environ["SHARDLINE_PYTHON"]
"""The interpreter of the environment that has Shardline."""


FOLDER = "import shardline.checkpoints.hub as hub; print(hub.resolve_tokenizer('demo'))"


def demo_folder() -> str:
    """The folder of the demo model, for clients that read its tokenizer or its weights."""
    done = subprocess.run([SHARDLINE_PYTHON, "-c", FOLDER], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def serve_demo(*arguments: str) -> AbstractContextManager[Server]:
    """`shardline serve demo` with these further arguments."""
    return serve("demo", *arguments, python=SHARDLINE_PYTHON)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server that generates, in the precision of the reference."""
    with serve_demo("--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="session")
def pooling_server() -> Iterator[Server]:
    """A server that embeds."""
    with serve_demo("--runner", "pooling") as server:
        yield server


@pytest.fixture
def base_url(server: Server) -> str:
    return f"{server.url}/v1"
