"""The core of the API, with the server's models on plain torch operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.serving import Server, serve
from tests.e2e.test_openai_client import (  # noqa: F401 (they run here, with this server)
    test_bad_requests_are_told_and_hurt_nobody,
    test_choices_differ_and_seeds_repeat,
    test_stop,
    test_streamed_and_whole_answers_are_one,
)
from tests.e2e.test_structured_outputs import test_a_required_call_is_valid  # noqa: F401


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ("--device", "cpu", "--kernels", "torch", "-tp", "2", "--enable-auto-tool-choice", "--on-failure", "exit")
    with serve(*options) as server:
        yield server


def test_the_report_names_the_kernels(server: Server) -> None:
    assert "torch2." in server.output
