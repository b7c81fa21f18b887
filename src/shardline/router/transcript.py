"""What a client has got of a stream, so that the stream can go on at another backend."""

from __future__ import annotations

import contextlib

import msgspec

from shardline.server.resume import MARK, Progress, Resume
from shardline.server.sse import DONE_EVENT

_HELD_BYTES = 256 << 10
"""What may wait for its mark; a stream with larger steps cannot go on elsewhere while one of them is under way."""
_GOES_ON_AFTER = frozenset({"engine_dead", "draining", "overloaded_error"})
"""Codes of errors in a stream after which another backend can go on with it; Anthropic's have a type instead."""
_first_decoder = msgspec.json.Decoder(Resume)
_decoder = msgspec.json.Decoder(Progress)


class _Error(msgspec.Struct):
    message: str
    code: str | None = None
    type: str | None = None


class _Failed(msgspec.Struct):
    error: _Error | None = None


class _ErrorEvent(_Failed):
    response: _Failed | None = None
    """Where a response has its error."""


_error_decoder = msgspec.json.Decoder(_ErrorEvent)


class Transcript:
    """Reads one stream, be it of several backends in turn, and takes the marks out.

    What comes after a mark is held back until the next mark: so the client has got what the marks say, and no more. Of
    a stream without marks, half an event is held back, so that an error can follow whatever the client has got.
    """

    def __init__(self, *, is_plain: bool = False) -> None:
        """`is_plain`: it has no marks, or its client wants them."""
        self._so_far: Resume | None = None
        self._is_plain = is_plain
        self.problem = ""
        """Why nothing more of this backend counts; empty: all is well."""
        self._has_begun = False
        """The client has got events, and a mark has covered them."""
        self._flows = False
        """Too much has come since the last mark to be held back, so the client has got a part of it."""
        self._is_inside = False
        """The client has got the beginning of an event whose end has not come."""
        self._rest = b""
        self._held: list[bytes] = []
        self._num_held = 0
        self._num_events = 0

    @property
    def so_far(self) -> Resume | None:
        """What to ask another backend with; None: none can go on with the stream."""
        return self._so_far if self._has_begun and not self._flows else None

    def read(self, data: bytes) -> bytes:
        """What the client gets, now that these bytes have come."""
        data = self._rest + data
        if self._so_far is None and not MARK.startswith(data[: len(MARK)]):
            self._is_plain = True
        if self._is_plain:
            end = _end_of_events(data)
            self._rest = data[end:]
            return data[:end]
        ready: list[bytes] = []
        *blocks, self._rest = data.split(b"\n\n")
        for block in blocks:
            event = block + b"\n\n"
            is_event = self._is_inside or not block.startswith(b":")
            is_mark = not is_event and block.startswith(MARK)
            self._is_inside = False
            if is_event:
                self._held.append(event)
                self._num_held += len(event)
                self._num_events += 1
            if is_mark:
                self._has_begun = self._so_far is not None
                self._note_mark(block[len(MARK) :])
            elif event == DONE_EVENT:
                self._check_last(self._held[-2:-1])
            if self.problem:
                break
            if is_mark or event == DONE_EVENT:
                ready += self._release()
                self._flows = False
            elif not is_event:
                ready.append(event)  # it keeps the connection alive
        self._flows = self._flows or self._num_held + len(self._rest) > _HELD_BYTES
        if self._flows and not self.problem:
            self._is_inside = bool(self._rest)
            ready.append(self._take_all())
        return b"".join(ready)

    def end(self) -> bytes:
        """What is left of a stream that has ended; see `problem`."""
        self._check_last(self._held[-1:])
        return b"" if self.problem else self._take_all()

    def cut(self) -> None:
        """The backend has failed: forget what the client has not got. Another one may go on."""
        self._take_all()
        self.problem = ""
        self._num_events = 0 if self._so_far is None else self._so_far.num_events

    def _take_all(self) -> bytes:
        rest, self._rest = self._rest, b""
        return b"".join([*self._release(), rest])

    def _release(self) -> list[bytes]:
        ready, self._held, self._num_held = self._held, [], 0
        return ready

    def _check_last(self, events: list[bytes]) -> None:
        """Look whether the last event says that the backend cannot go on, and another one can."""
        for event in events:
            with contextlib.suppress(msgspec.DecodeError):
                said = _error_decoder.decode(event.partition(b"data: ")[2])
                error = said.error or (said.response and said.response.error)
                if error and not _GOES_ON_AFTER.isdisjoint((error.code, error.type)):
                    self.problem = error.message

    def _note_mark(self, data: bytes) -> None:
        try:
            if self._so_far is None:
                self._so_far = _first_decoder.decode(data)
                return
            self._so_far.num_events = self._num_events
            if data == b"[]":
                return
            progress = _decoder.decode(data)
            prompt = self._so_far.prompts[progress.prompt]
            prompt.num_cached_tokens = progress.num_cached_tokens
            for place, (index, token_ids, finished) in enumerate(progress.choices):
                choice = prompt.choices[index]
                choice.token_ids += token_ids
                choice.finished = finished
                if progress.digests:
                    choice.digests = (choice.digests or []) + progress.digests[place]
        except (msgspec.DecodeError, IndexError):
            self.problem = "what it says of its tokens makes no sense"


def _end_of_events(data: bytes) -> int:
    """Where the last whole event ends; the end of all if that is too far."""
    if data.endswith(b"\n\n"):
        return len(data)
    end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3)
    end = end if end > 2 else 0
    return end if len(data) - end <= _HELD_BYTES else len(data)
