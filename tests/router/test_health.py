"""How backends are looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from shardline.config.router import RouterConfig
from shardline.router.fleet import Fleet
from shardline.router.health import HealthChecker
from shardline.router.upstream import Header, Upstream, UpstreamError

LATE = UpstreamError("nothing came for 5 s", is_late=True)
CUT = UpstreamError("it has closed the connection")


class Scripted(Upstream):
    """A backend that answers looks in turn with a status, or fails."""

    def __init__(self, *answers: int | UpstreamError) -> None:
        super().__init__("http://a:1", 1.0)
        self.answers = list(answers)

    async def get(self, path: bytes, headers: Sequence[Header], timeout: float, limit: int) -> tuple[int, bytes]:
        answer = self.answers.pop(0)
        if isinstance(answer, UpstreamError):
            raise answer
        return answer, b""


@pytest.mark.parametrize(
    ("was_ready", "answers", "problem"),
    [
        (True, [LATE, 200], ""),
        (True, [LATE, LATE], "nothing came for 5 s"),
        (True, [LATE, 503], "GET /ready says 503"),
        (True, [CUT], "it has closed the connection"),
        (False, [LATE], "nothing came for 5 s"),
        (False, [404, 200], ""),
        (False, [404, 405], "it has neither /ready nor /health"),
    ],
)
def test_a_backend_that_was_ready_and_is_late_is_asked_twice(
    was_ready: bool, answers: list[int | UpstreamError], problem: str
) -> None:
    config = RouterConfig(("http://a:1",))
    fleet = Fleet(config)
    [backend] = fleet.backends
    backend.is_ready, backend.upstream = was_ready, Scripted(*answers)
    assert asyncio.run(HealthChecker(fleet, config)._find_problem(backend)) == problem
    assert not backend.upstream.answers, "it is not asked more often, nor less"
