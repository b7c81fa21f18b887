"""Which backend keeps which response of /v1/responses: no other one can continue it, show it or end it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from urllib.parse import quote

from shardline.router.fleet import Backend, Fleet
from shardline.router.upstream import Header, UpstreamError
from shardline.server.errors import ApiError, unavailable

PATH = "/v1/responses"
_MOST = 65_536
"""Responses whose backends are remembered."""
_HEAD_BYTES = 4096
"""Of a part of an answer, in which its id is sought."""
_ID = re.compile(rb'"id": ?"(resp_[\w-]{1,120})"')
_OF_ONE = re.compile(PATH + r"/([^/]+)(/cancel|/input_items)?")


def response_of(method: str, path: str) -> str:
    """The id of the response that a request looks up, ends or forgets; empty: it does nothing of these."""
    found = _OF_ONE.fullmatch(path)
    return found[1] if found and (method != "POST" or found[2] == "/cancel") else ""


class KeptResponses:
    """The backends of the responses that were made or continued last."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._urls: dict[str, str] = {}
        """By ids, the latest last."""

    def learn(self, part: bytes, backend: Backend) -> bool:
        """Whether a part of an answer of a backend says the response's id, which is remembered."""
        found = _ID.search(part, 0, _HEAD_BYTES)
        if found:
            self.note(found[1].decode(), backend)
        return found is not None

    def note(self, response_id: str, backend: Backend) -> None:
        """A backend keeps this response."""
        self._urls.pop(response_id, None)
        self._urls[response_id] = backend.url
        if len(self._urls) > _MOST:
            del self._urls[next(iter(self._urls))]

    def find(self, response_id: str, param: str = "response_id") -> Backend | None:
        """The backend that keeps a response; None: it is not known.

        Raises:
            ApiError: that backend is gone, or cannot be asked now. `param`: the field that names the response.
        """
        url = self._urls.get(response_id)
        if url is None:
            return None
        backend = next((backend for backend in self._fleet.backends if backend.url == url), None)
        instead = "" if param == "response_id" else " Send the whole conversation as 'input' instead."
        if backend is None:
            raise ApiError(
                404,
                f"Response with id '{response_id}' not found: its backend {url} is no longer there.{instead}",
                param=param,
                code="response_not_found" if param == "response_id" else "previous_response_not_found",
            )
        self.note(response_id, backend)
        state = backend.state(time.monotonic())
        if state in ("down", "failing") or (state == "draining" and instead):
            why = f" ({backend.problem})" if backend.problem else ""
            message = f"Only the backend {url} has the response '{response_id}', and it is {state} now{why}.{instead}"
            raise unavailable(message, "no_backend", 1)
        return backend

    async def find_previous(self, response_id: str, headers: Sequence[Header], timeout: float) -> Backend | None:
        """The backend that keeps a response that is to be continued. Of one that is new here, all are asked.

        `headers`: the client's; `timeout`: seconds for each backend. None: nobody has it. Raises as `find`.
        """
        if backend := self.find(response_id, "previous_response_id"):
            return backend
        target = f"{PATH}/{quote(response_id, safe='')}".encode()
        for backend in self._fleet.reachable():
            try:
                answer = await backend.upstream.send(b"GET", target, headers, b"", timeout)
            except UpstreamError:
                continue
            answer.close()
            if answer.status == 200:
                self.note(response_id, backend)
                return backend
        return None
