"""The streams of outputs in flight, and what brings the engines' outputs to them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from shardline.api.engines import EngineEvent
from shardline.api.output_processor import ChoiceState, RequestState
from shardline.api.outputs import RequestOutput
from shardline.api.replicas import Replicas
from shardline.api.requests import PreparedRequest
from shardline.api.resume import copy_reported
from shardline.messages.request import SequenceOutput
from shardline.messages.timeline import RequestMetrics
from shardline.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class RequestStream(RequestState):
    """The outputs of one admitted request: `async for output in stream`.

    Each item is the same RequestOutput object, with what has been added to it. If the reader is slow, several updates
    become one item. `aclose` aborts the request, and so does cancelling the task that waits for an item. Breaking out
    of the loop does not abort it: use `contextlib.aclosing`.

    Instead of iterating, a reader may `listen`. That wakes no task, so it costs less.
    """

    __slots__ = ("_abort", "_ended", "_updated", "_waiter", "on_change", "replayed")

    def __init__(self, request: PreparedRequest, tokenizer: Tokenizer | None, abort: Callable[[str], None]) -> None:
        super().__init__(request, tokenizer)
        self._abort = abort
        self._updated = False
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self.on_change: Callable[[], None] = self._wake_reader
        """What the owner calls when the output has changed."""
        self.replayed = None if request.so_far is None else copy_reported(self.output, request.params)
        """The output that was reported elsewhere; None: the request has begun here."""

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        if not self._updated:
            # A future of its own costs half of what asyncio.Event does, for every token of every stream.
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                await self.aclose()
                raise
        self._updated = False
        self._ended = self.output.finished
        return self.output

    def listen(self, on_update: Callable[[], None] | None) -> None:
        """Call `on_update` each time that `output` has changed, and now if it has already; None: call nothing.

        It runs on the event loop and must not raise.
        """
        if on_update is not None:
            self.on_change = on_update
            if self._updated:
                self._updated = False
                on_update()
        elif self.output.finished:
            self.forget_reader()
        else:
            self.on_change = self._wake_reader

    async def aclose(self) -> None:
        """Abort the request if it has not finished. The stream then has no more items."""
        self._ended = True
        if not self.output.finished:
            self._abort(self.output.request_id)

    def metrics(self) -> RequestMetrics:
        """Where the time has gone so far."""
        return self.output.metrics or super().metrics()

    def forget_reader(self) -> None:
        """Call nobody any more: the reader knows of the last change."""
        self.on_change = _ignore_change

    def _wake_reader(self) -> None:
        self._updated = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _ignore_change() -> None:
    pass


def watch_finish(streams: Sequence[RequestStream]) -> Callable[[], bool]:
    """A function that says whether all streams have finished; a finished stream is looked at once, by all its calls."""
    left = len(streams)

    def finished() -> bool:
        nonlocal left
        while left and streams[left - 1].output.finished:
            left -= 1
        return not left

    return finished


class Streams:
    """The requests that run on the replicas, each with its stream. One thread calls all methods."""

    def __init__(self, replicas: Replicas, tokenizer: Tokenizer | None) -> None:
        self._replicas = replicas
        self._tokenizer = tokenizer
        self._requests: dict[str, RequestStream] = {}
        self._by_child: dict[str, tuple[RequestStream, ChoiceState]] = {}

    def __len__(self) -> int:
        """User requests that have not finished."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def open(self, request: PreparedRequest, *, bounded: bool = True) -> RequestStream:
        """Run a request; `bounded`: see `Replicas.add_requests`.

        Raises:
            QueueFull, EngineRecovering, EngineDead: see `Replicas.add_requests`.
            ValueError: its output so far has come to its end.
        """
        stream = RequestStream(request, self._tokenizer, self.abort)
        if children := stream.unfinished_children():
            self._requests[request.request_id] = stream
            for child, choice in zip(request.children, stream.choices, strict=True):
                self._by_child[child.request_id] = stream, choice
            try:
                self._replicas.add_requests(children, bounded=bounded)
            except BaseException:
                self.abort(request.request_id)
                raise
        else:
            stream.finish()
        return stream

    def abort(self, request_id: str) -> None:
        """End a request; its stream ends with the finish reason "abort". Unknown ids are ignored."""
        stream = self._requests.get(request_id)
        if stream is None:
            return
        children = [child.request_id for child in stream.unfinished_children()]
        for choice in stream.choices:
            choice.abort()
        self._finish(stream)
        self._replicas.abort_requests(children)
        stream.on_change()
        stream.forget_reader()

    def abort_all(self) -> None:
        """End all requests."""
        for request_id in list(self._requests):
            self.abort(request_id)

    def add_outputs(self, outputs: Iterable[SequenceOutput]) -> list[RequestStream]:
        """Add engine outputs to their streams, and tell the readers. Those of unknown requests are ignored.

        Returns the requests that have changed, each once, in the order of the outputs.
        """
        updated: dict[RequestStream, None] = {}
        aborts: list[str] = []
        now = time.monotonic()
        for step in outputs:
            child = self._by_child.get(step.request_id)
            if child is None:
                continue
            stream, choice = child
            output = choice.output
            if output.finish_reason is not None:
                continue
            try:
                stopped = choice.add_output(step, now)
            except Exception as error:  # it is this request's only; the others must go on
                _log.exception("request %s: its output cannot be turned into text", stream.request.request_id)
                choice.fail(f"the output cannot be turned into text: {type(error).__name__}: {error}")
                stopped = step.finish_reason is None
            if stopped:
                aborts.append(step.request_id)
            if step.embedding:
                output.embedding = step.embedding
            if step.prompt_logprobs is not None:
                stream.output.prompt_token_logprobs = step.prompt_logprobs
            cached = step.num_cached_tokens
            if cached and cached > stream.output.num_cached_tokens and not stream.is_counted:
                stream.output.num_cached_tokens = cached
            updated[stream] = None
            if output.finish_reason is not None and not stream.unfinished_children():
                self._finish(stream)
        if aborts:
            self._replicas.abort_requests(aborts)
        for stream in updated:
            stream.on_change()
            if stream.output.finished:
                stream.forget_reader()
        return list(updated)

    def _finish(self, stream: RequestStream) -> None:
        stream.finish()
        self._requests.pop(stream.request.request_id, None)
        for child in stream.request.children:
            self._by_child.pop(child.request_id, None)


class Inbox:
    """Carries engine events from the clients' reader threads to the event loop, several at once.

    Events that arrive before `open` are kept until then.
    """

    def __init__(self, deliver: Callable[[int, EngineEvent], None]) -> None:
        self._deliver = deliver
        self._events: deque[tuple[int, EngineEvent]] = deque()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakeup_pending = False

    def put_event(self, index: int, event: EngineEvent) -> None:
        """Add an event of replica `index`; any thread may call this."""
        with self._lock:
            self._events.append((index, event))
            self._wake_loop()

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to deliver events on this loop."""
        with self._lock:
            self._loop = loop
            self._wake_loop()

    def close(self) -> None:
        """Stop delivering events."""
        with self._lock:
            self._loop = None

    def _wake_loop(self) -> None:
        if self._events and self._loop is not None and not self._wakeup_pending and not self._loop.is_closed():
            self._wakeup_pending = True
            self._loop.call_soon_threadsafe(self._deliver_events)

    def _deliver_events(self) -> None:
        with self._lock:
            self._wakeup_pending = False
            events, self._events = self._events, deque()
        try:
            while events:
                self._deliver(*events.popleft())
        finally:
            if events:  # one failed; the others belong to other requests
                with self._lock:
                    self._events.extendleft(reversed(events))
                    self._wake_loop()
