"""What a client has got of a stream, so that the stream can go on at another backend."""

from __future__ import annotations

import msgspec

from shardline.router.upstream import UpstreamError
from shardline.server.resume import MARK, Progress, Resume
from shardline.server.sse import DONE_EVENT

_HELD_BYTES = 256 << 10
"""What may wait for its mark; a stream with larger steps cannot go on elsewhere while one of them is under way."""
_GOES_ON_AFTER = frozenset({"engine_dead", "draining"})
"""Codes of errors in a stream after which another backend can go on with it."""
_first_decoder = msgspec.json.Decoder(Resume)
_decoder = msgspec.json.Decoder(Progress)


class _Error(msgspec.Struct):
    message: str
    code: str | None = None


class _ErrorEvent(msgspec.Struct):
    error: _Error


_error_decoder = msgspec.json.Decoder(_ErrorEvent)


class Transcript:
    """Reads one stream, be it of several backends in turn, and takes the marks out.

    What comes after a mark is held back until the next mark: so the client has got what the marks say, and no more.
    """

    def __init__(self) -> None:
        self._so_far: Resume | None = None
        self.problem = ""
        """Why the backend has ended the stream although it is not over; empty: it has not."""
        self._is_plain = False
        """It has no marks."""
        self._is_torn = False
        """The client has got a part of what comes before the next mark."""
        self._rest = b""
        self._held: list[bytes] = []
        self._num_held = 0

    @property
    def so_far(self) -> Resume | None:
        """What to ask another backend with; None: none can go on with the stream."""
        return None if self._is_torn else self._so_far

    def begin(self) -> None:
        """A backend begins with the stream, or goes on with it."""
        self._rest, self._held, self._num_held, self.problem = b"", [], 0, ""

    def read(self, data: bytes) -> bytes:
        """What the client gets, now that these bytes have come.

        Raises:
            UpstreamError: its marks make no sense.
        """
        data = self._rest + data
        if self._so_far is None and not MARK.startswith(data[: len(MARK)]):
            self._is_plain = True
        if self._is_plain:
            self._rest = b""
            return data
        ready: list[bytes] = []
        *blocks, self._rest = data.split(b"\n\n")
        for block in blocks:
            event = block + b"\n\n"
            if block.startswith(MARK):
                self._note_mark(block[len(MARK) :])
                ready += self._release()
                self._is_torn = False
            elif block.startswith(b":"):
                ready.append(event)  # it keeps the connection alive
            elif event == DONE_EVENT and self._find_problem():
                break
            else:
                self._held.append(event)
                self._num_held += len(event)
                if event == DONE_EVENT:
                    ready += self._release()
                elif self._num_held > _HELD_BYTES:
                    self._is_torn = True
                    ready += self._release()
        return b"".join(ready)

    def end(self) -> bytes:
        """What is left, since the stream is whole."""
        return b"".join([*self._release(), self._rest])

    def _release(self) -> list[bytes]:
        ready, self._held, self._num_held = self._held, [], 0
        return ready

    def _find_problem(self) -> bool:
        """Whether the last event says that the backend cannot go on, and another one can."""
        last = self._held[-1] if self._held else b""
        if not last.startswith(b'data: {"error":'):
            return False
        try:
            error = _error_decoder.decode(last[len(b"data: ") :]).error
        except msgspec.DecodeError:
            return False
        if error.code in _GOES_ON_AFTER:
            self.problem = error.message
        return bool(self.problem)

    def _note_mark(self, data: bytes) -> None:
        if data == b"[]":
            return
        try:
            if self._so_far is None:
                self._so_far = _first_decoder.decode(data)
                return
            progress = _decoder.decode(data)
            prompt = self._so_far.prompts[progress.prompt]
            prompt.num_cached_tokens = progress.num_cached_tokens
            for index, token_ids, finished in progress.choices:
                choice = prompt.choices[index]
                choice.token_ids += token_ids
                choice.finished = finished
        except (msgspec.DecodeError, IndexError):
            raise UpstreamError("what it says of its tokens makes no sense") from None
