"""Requests that wait at the router while all backends are full."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(order=True)
class Place:
    """A request's place: the least priority goes first, of equal ones that which came first."""

    priority: int
    number: int
    has_room: Callable[[], bool] = field(compare=False)
    """Whether a backend that could take the request is not known to be full."""
    turn: asyncio.Future[bool] | None = field(default=None, compare=False)


class Queue:
    """Requests in the order in which they try again; its methods belong to one event loop.

    A backend says that it is full, and not when it no longer is. So a request tries again for each that has ended, and
    when a backend's Retry-After is over.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: list[Place] = []
        self._num_places = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def place(self, priority: int, has_room: Callable[[], bool]) -> Place:
        """A place behind those of the same priority. A request keeps it as often as it waits."""
        self._num_places += 1
        return Place(priority, self._num_places, has_room)

    async def wait(self, place: Place, seconds: float, retry_after: float) -> bool:
        """Wait for the request's turn, at most `seconds`; after `retry_after`, whose turn it is may try.

        False: its time is over, or the queue is full of requests that go before it.
        """
        if seconds <= 0.0:
            return False
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[bool] = loop.create_future()
        place.turn = turn
        insort(self._waiting, place)
        if len(self._waiting) > self._limit:
            self._end(self._waiting[-1], False)
        timers = [
            loop.call_later(min(retry_after, seconds), self.let_next_try),
            loop.call_later(seconds, self._end, place, False),
        ]
        try:
            return await turn
        finally:
            for timer in timers:
                timer.cancel()
            if place in self._waiting:
                self._waiting.remove(place)

    def let_next_try(self) -> None:
        """The first request for which there may be room tries."""
        place = next((place for place in self._waiting if place.has_room()), None)
        if place is not None:
            self._end(place, True)

    def _end(self, place: Place, may_try: bool) -> None:
        if place in self._waiting:
            self._waiting.remove(place)
        if place.turn is not None and not place.turn.done():
            place.turn.set_result(may_try)
