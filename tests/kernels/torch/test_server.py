"""The core of the API, with the server's models on plain torch operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.serving import Server, serve
from tests.e2e.test_openai_client import (  # noqa: F401 (they run here, with this server)
    QUESTION,
    test_bad_requests_are_told_and_hurt_nobody,
    test_choices_differ_and_seeds_repeat,
    test_stop,
)
from tests.forks import ForkServer


@pytest.fixture(scope="module")
def server(fork_server: ForkServer) -> Iterator[Server]:
    options = ("--device", "cpu", "--kernels", "torch", "--on-failure", "exit")
    with serve(*options, forks=fork_server) as server:
        yield server


def test_the_report_names_the_kernels(server: Server) -> None:
    assert "torch2." in server.output


def test_a_grammar_and_log_probabilities(server: Server) -> None:
    asked = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = server.client().chat.completions.create(
        model="demo", messages=QUESTION, temperature=1.0, seed=5, logprobs=True, top_logprobs=3, extra_body=asked
    )
    (choice,) = answer.choices
    assert choice.message.content in ("yes", "no")
    assert choice.logprobs is not None
    assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content or ())
