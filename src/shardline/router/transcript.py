"""What a client has got of a stream, so that the stream can go on at another backend."""

from __future__ import annotations

import contextlib

import msgspec

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
        self._is_plain = False
        """It has no marks."""
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
            self._rest = b""
            return data
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
            if is_mark:
                self._has_begun = self._so_far is not None
                self._note_mark(block[len(MARK) :])
            elif event == DONE_EVENT:
                self._check_end()
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
            ready.append(self.end())
        return b"".join(ready)

    def end(self) -> bytes:
        """What is left of a stream that is whole."""
        rest, self._rest = self._rest, b""
        return b"".join([*self._release(), rest])

    def cut(self) -> None:
        """The backend has failed: forget what the client has not got. Another one may go on."""
        self.end()
        self.problem = ""

    def _release(self) -> list[bytes]:
        ready, self._held, self._num_held = self._held, [], 0
        return ready

    def _check_end(self) -> None:
        """Look whether the last event says that the backend cannot go on, and another one can."""
        last = self._held[-2] if len(self._held) > 1 else b""
        if last.startswith(b'data: {"error":'):
            with contextlib.suppress(msgspec.DecodeError):
                error = _error_decoder.decode(last[len(b"data: ") :]).error
                if error.code in _GOES_ON_AFTER:
                    self.problem = error.message

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
            for place, (index, token_ids, finished) in enumerate(progress.choices):
                choice = prompt.choices[index]
                choice.token_ids += token_ids
                choice.finished = finished
                if progress.digests:
                    choice.digests = (choice.digests or []) + progress.digests[place]
        except (msgspec.DecodeError, IndexError):
            self.problem = "what it says of its tokens makes no sense"
