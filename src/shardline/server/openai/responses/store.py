"""The responses that a server keeps, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class _Turn:
    """One turn of a conversation. Continuations share the turns before them."""

    items: bytes
    parent: _Turn | None
    num_users: int = 1
    """The stored response, if it is still there, and the turns that continue this one."""


@dataclass(frozen=True)
class _Entry:
    answer: bytes
    turn: _Turn
    events: Sequence[bytes] = ()

    @property
    def num_bytes(self) -> int:
        """Without the turn, which others may share."""
        return len(self.answer) + sum(map(len, self.events))


class ResponseStore:
    """Keeps responses in memory; when they have more than `limit` bytes, the least recently used ones go.

    A response that others continue may go or be deleted: its turn remains until the last of them is gone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self.num_bytes = 0
        """Bytes of all answers and events, and of all turns that are reachable."""

    def __len__(self) -> int:
        return len(self._entries)

    def add_response(self, response_id: str, answer: bytes, items: bytes, previous_id: str | None) -> bool:
        """Keep `answer`, the response as JSON, and `items`, the JSON of the turn's input and output items.

        Returns whether it is kept. It is not if the response `previous_id` is gone meanwhile, or if the answer is
        larger than the store.
        """
        previous = None if previous_id is None else self._entries.get(previous_id)
        if (previous_id is not None and previous is None) or len(answer) + len(items) > self._limit:
            return False
        turn = _Turn(items, None if previous is None else previous.turn)
        if turn.parent is not None:
            turn.parent.num_users += 1
        self._entries[response_id] = _Entry(answer, turn)
        self.num_bytes += len(answer) + len(items)
        self._evict()
        return True

    def end_response(self, response_id: str, answer: bytes, items: bytes, events: Sequence[bytes]) -> None:
        """Replace what was kept of a response that runs in the background; `events`: those of its stream.

        If it is gone meanwhile, nothing is kept. If it is too large now, it goes.
        """
        entry = self._entries.get(response_id)
        if entry is None:
            return
        ended = _Entry(answer, entry.turn, events)
        self.num_bytes += ended.num_bytes - entry.num_bytes + len(items) - len(entry.turn.items)
        entry.turn.items = items
        self._entries[response_id] = ended
        if ended.num_bytes + len(items) > self._limit:
            self.delete_response(response_id)
        self._evict()

    def find_answer(self, response_id: str) -> bytes | None:
        """The JSON of a response; None: there is none of this id."""
        entry = self._touch(response_id)
        return None if entry is None else entry.answer

    def find_events(self, response_id: str) -> Sequence[bytes]:
        """The events of a response that was streamed in the background; empty: there are none."""
        entry = self._touch(response_id)
        return () if entry is None else entry.events

    def find_items(self, response_id: str) -> list[bytes] | None:
        """For each turn up to this response, oldest first, the JSON of its items; None: there is no such response."""
        entry = self._touch(response_id)
        if entry is None:
            return None
        turns = []
        turn: _Turn | None = entry.turn
        while turn is not None:
            turns.append(turn.items)
            turn = turn.parent
        return turns[::-1]

    def delete_response(self, response_id: str) -> bool:
        """Forget a response; returns whether there was one of this id."""
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return False
        self.num_bytes -= entry.num_bytes
        turn: _Turn | None = entry.turn
        while turn is not None:
            turn.num_users -= 1
            if turn.num_users > 0:
                break
            self.num_bytes -= len(turn.items)
            turn = turn.parent
        return True

    def _evict(self) -> None:
        while self.num_bytes > self._limit:
            self.delete_response(next(iter(self._entries)))

    def _touch(self, response_id: str) -> _Entry | None:
        entry = self._entries.get(response_id)
        if entry is not None:
            self._entries.move_to_end(response_id)
        return entry
