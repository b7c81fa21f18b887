"""Requests that wait at the router while all backends are full."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.router import proxy
from shardline.router.queue import Queue
from tests.router.backends import Call, Site, stream_words


class OneSeat:
    """A backend that runs one request at a time, until it is told to answer, and refuses others."""

    def __init__(self, retry_after: str = "9") -> None:
        self._retry_after = retry_after
        self._may_answer = threading.Semaphore(0)
        self._is_taken = False
        self.ran: list[str] = []
        self.num_refused = 0

    async def behave(self, call: Call) -> None:
        if self._is_taken:
            self.num_refused += 1
            await call.answer(429, {"error": {"message": "full"}}, retry_after=self._retry_after)
            return
        self._is_taken = True
        self.ran.append(call.fields["prompt"])
        try:
            while not self._may_answer.acquire(blocking=False):
                await asyncio.sleep(0.002)
        finally:
            self._is_taken = False
        await stream_words(call)

    def answer(self, count: int = 1) -> None:
        self._may_answer.release(count)


def waiting(site: Site) -> int:
    text = site.client.get("/metrics").text
    [line] = [line for line in text.splitlines() if line.startswith("shardline_router:requests_waiting ")]
    return int(float(line.split()[1]))


def ask_beside(site: Site, statuses: dict[str, int], prompt: str, **fields: Any) -> threading.Thread:
    """A request in a thread of its own, which notes its status."""

    def ask() -> None:
        statuses[prompt] = site.ask(prompt, stream=True, **fields).status_code

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def has_run(seat: OneSeat, number: int) -> bool:
    return len(seat.ran) == number


def wait_until(site: Site, number: int) -> None:
    """Wait until so many requests wait."""
    for _ in range(2000):
        if waiting(site) == number:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{waiting(site)} wait, not {number}")


def test_full_backends_get_waiting_requests_by_priority(site: Site) -> None:
    seat = OneSeat()
    site.add_backend(seat.behave)
    site.start_router(max_queue=3, queue_timeout=60.0)
    statuses: dict[str, int] = {}
    threads = [ask_beside(site, statuses, "first")]
    site.wait_for(lambda: seat.ran == ["first"])
    for number, (prompt, priority) in enumerate([("late", 5), ("usual", 0), ("usual too", 0), ("soon", -1)], 1):
        threads.append(ask_beside(site, statuses, prompt, priority=priority))
        if number < 4:
            wait_until(site, number)
    site.wait_for(lambda: "late" in statuses)
    assert statuses == {"late": 429}, "the last one makes room in the queue"
    for number in range(2, 5):
        seat.answer()
        site.wait_for(partial(has_run, seat, number))
        wait_until(site, 4 - number)
    seat.answer()
    for thread in threads:
        thread.join(60.0)
    assert seat.ran == ["first", "soon", "usual", "usual too"]
    assert [statuses[prompt] for prompt in seat.ran] == [200] * 4
    assert waiting(site) == 0


def test_a_request_that_waits_too_long_hears_when_to_come_again(site: Site) -> None:
    seat = OneSeat()
    site.add_backend(seat.behave)
    site.start_router(queue_timeout=0.2)
    statuses: dict[str, int] = {}
    thread = ask_beside(site, statuses, "first")
    site.wait_for(lambda: seat.ran == ["first"])
    answer = site.ask("second")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "9")
    assert seat.num_refused == 1
    seat.answer()
    thread.join(60.0)
    assert statuses == {"first": 200}


def test_a_client_that_leaves_gives_its_place_back(site: Site) -> None:
    seat = OneSeat()
    site.add_backend(seat.behave)
    site.start_router(queue_timeout=60.0)
    statuses: dict[str, int] = {}
    threads = [ask_beside(site, statuses, "first")]
    site.wait_for(lambda: seat.ran == ["first"])
    site.run(_leave(site))
    wait_until(site, 0)
    threads.append(ask_beside(site, statuses, "second"))
    wait_until(site, 1)
    seat.answer(2)
    for thread in threads:
        thread.join(60.0)
    assert seat.ran == ["first", "second"]


def test_a_client_that_leaves_makes_room_at_its_backend(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "_MOST_BUSY_SECONDS", 600.0)
    seat = OneSeat(retry_after="600")
    site.add_backend(seat.behave)
    site.start_router(queue_timeout=20.0)
    writer = site.run(_send(site))
    site.wait_for(lambda: seat.ran == ["gone"])
    statuses: dict[str, int] = {}
    thread = ask_beside(site, statuses, "second")
    wait_until(site, 1)
    site.run(_close(writer))
    # On a busy machine, the backend may notice the departure later than it is asked again.
    site.wait_for(lambda: len(seat.ran) + seat.num_refused > 2 or "second" in statuses)
    assert len(seat.ran) + seat.num_refused > 2
    seat.answer()
    thread.join(60.0)


async def _leave(site: Site) -> None:
    """Send a request, and leave before the answer."""
    writer = await _send(site)
    await asyncio.sleep(0.1)
    await _close(writer)


async def _send(site: Site) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", site.client.base_url.port)
    body = b'{"model": "m", "prompt": "gone"}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    return writer


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


@given(
    limit=st.integers(0, 4),
    moves=st.lists(
        st.one_of(st.tuples(st.just("wait"), st.integers(-2, 2), st.booleans()), st.just("try")), max_size=20
    ),
)
def test_the_queue_is_one_sorted_list(limit: int, moves: list[Any]) -> None:
    asyncio.run(_compare(limit, moves))


async def _compare(limit: int, moves: list[Any]) -> None:
    queue = Queue(limit)
    model: list[tuple[int, int, bool]] = []
    ends: dict[int, asyncio.Task[bool]] = {}
    for number, move in enumerate(moves):
        if move == "try":
            queue.let_next_try()
            if (chosen := next((entry for entry in model if entry[2]), None)) is not None:
                model.remove(chosen)
                assert await ends.pop(chosen[1]) is True
        else:
            _, priority, has_room = move
            place = queue.place(priority, partial(bool, has_room))
            ends[number] = asyncio.create_task(queue.wait(place, 60.0, 60.0))
            await asyncio.sleep(0)
            model = sorted([*model, (priority, number, has_room)])
            if len(model) > limit:
                assert await ends.pop(model.pop()[1]) is False
        assert len(queue) == len(model)
    for end in ends.values():
        end.cancel()
    await asyncio.gather(*ends.values(), return_exceptions=True)
    assert len(queue) == 0
