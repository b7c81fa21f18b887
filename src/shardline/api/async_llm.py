"""AsyncLLM: an engine whose outputs are streams, for servers. It never blocks the event loop."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Literal

from shardline.api.engines import Connect, EngineEvent
from shardline.api.errors import EngineDead, EngineDraining, QueueFull
from shardline.api.model_text import ModelText, load_model_text
from shardline.api.output_processor import OutputProcessor, RequestState
from shardline.api.replicas import Replicas
from shardline.api.requests import Prompt, RequestBuilder, split_prompt
from shardline.config.engine import EngineConfig
from shardline.sampling_params import SamplingParams
from shardline.stats import EngineStats, merge_stats
from shardline.structured.grammar import check_grammar, is_checked
from shardline.text.chat_template import ChatTemplate
from shardline.text.tokenizer import Tokenizer
from shardline.timeline import RequestMetrics
from shardline.types import RequestOutput

State = Literal["starting", "ready", "recovering", "draining", "dead"]

__all__ = ["AsyncLLM", "EngineDead", "EngineDraining", "Prompt", "QueueFull", "RequestStream", "State", "merge_stats"]


MAX_INLINE_GRAMMAR_CHARS = 4096
"""Longest grammar that is checked on the event loop. It takes about 1 ms."""

_RANKS_TIME = 3
"""How much longer ranks may take to compile a grammar than the front takes to check it."""


class RequestStream:
    """The outputs of one admitted request: `async for output in stream`.

    Each item is the same RequestOutput object, with what has been added to it. If the reader is slow, several updates
    become one item. `aclose` aborts the request, and so does cancelling the task that waits for an item. Breaking out
    of the loop does not abort it: use `contextlib.aclosing`.

    Instead of iterating, a reader may `listen`. That wakes no task, so it costs less.
    """

    __slots__ = ("_abort", "_ended", "_state", "_updated", "_waiter", "output")

    def __init__(self, state: RequestState, abort: Callable[[str], None]) -> None:
        self.output = state.output
        self._state = state
        self._abort = abort
        self._updated = False
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        state.on_change = self._wake_reader

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
            self._state.on_change = on_update
            if self._updated:
                self._updated = False
                on_update()
        elif self.output.finished:
            self._state.forget_reader()
        else:
            self._state.on_change = self._wake_reader

    async def aclose(self) -> None:
        """Abort the request if it has not finished. The stream then has no more items."""
        self._ended = True
        if not self.output.finished:
            self._abort(self.output.request_id)

    def metrics(self) -> RequestMetrics:
        """Where the time has gone so far."""
        return self.output.metrics or self._state.metrics()

    def _wake_reader(self) -> None:
        self._updated = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Inbox:
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
        for index, event in events:
            self._deliver(index, event)


class AsyncLLM:
    """An engine with `data_parallel_size` replicas. All methods must be called on one event loop.

    These are valid once the engine is ready: `tokenizer` (None: prompts must be token ids), `chat_template` (None: no
    chats), `max_model_len` and `block_size` in tokens, `fingerprint`, and `report` (the engines' start-up lines).
    `dead_reason` says why the state is "dead".
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        connect: Connect | None = None,
        load_text: Callable[[EngineConfig], ModelText] = load_model_text,
    ) -> None:
        """Start the engine processes, without waiting for them; `connect` and `load_text` are for tests.

        Raises:
            ValueError: the configuration is invalid; nothing was started.
        """
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self.chat_template: ChatTemplate | None = None
        self.max_model_len = 0
        self.block_size = 0
        self.fingerprint = ""
        self.report: list[str] = []
        self.dead_reason = ""
        self._dead = asyncio.Event()
        self._load_text = load_text
        self._builder: RequestBuilder | None = None
        self._processor = OutputProcessor(None)
        self._draining = False
        self._inbox = _Inbox(self._on_event)
        self._replicas = Replicas(config, self._inbox.put_event, connect)

    async def wait_ready(self) -> None:
        """Wait until the engine accepts requests. If this fails, the engine is closed.

        Raises:
            ValueError: the configuration is at fault.
            RuntimeError: the engine failed.
        """
        if self._builder is not None:
            return
        loop = asyncio.get_running_loop()
        engines = loop.run_in_executor(None, self._replicas.wait_ready)
        reading = loop.run_in_executor(None, self._load_text, self._replicas.config)
        try:
            ready, text = await asyncio.gather(engines, reading)
        except BaseException as error:
            await self._end_engine(str(error) or "the start was cancelled")
            await asyncio.gather(engines, reading, return_exceptions=True)
            raise
        self.tokenizer, self.chat_template = text.tokenizer, text.chat_template
        self.max_model_len = min(one.max_model_len for one in ready)
        self.block_size = ready[0].block_size
        self.fingerprint = ready[0].fingerprint
        self.report = [line for one in ready for line in one.report]
        self._processor = OutputProcessor(text.tokenizer)
        self._builder = text.request_builder(self.config, self.max_model_len)
        self._inbox.open(loop)

    async def wait_dead(self) -> None:
        """Wait until the state is "dead"."""
        await self._dead.wait()

    async def prepare_grammar(self, grammar: str) -> None:
        """Check a grammar, and have the ranks compile it beside their steps, so that no stream waits for it.

        Raises:
            ValueError: it cannot be compiled; the message says what it lacks.
        """
        if is_checked(grammar):
            return
        started = time.perf_counter()
        if len(grammar) <= MAX_INLINE_GRAMMAR_CHARS:
            check_grammar(grammar)
        else:
            await asyncio.to_thread(check_grammar, grammar)
        self._replicas.prepare_grammar(grammar)
        # Ranks also build tables over the vocabulary, so they need longer than the check.
        await asyncio.sleep(_RANKS_TIME * (time.perf_counter() - started))

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        shown_token_ids: frozenset[int] = frozenset(),
        grammar: str = "",
    ) -> RequestStream:
        """Check and admit a request; the errors below are raised before any output.

        `shown_token_ids` and `grammar`: see `RequestBuilder.build_from_ids`.

        If its replica fails, the choices go on at another replica, or when one has started again. If that is
        impossible, they end with the finish reason "error" and the message as `error`.

        Raises:
            ValueError: the prompt or the parameters are invalid (HTTP 400).
            QueueFull: too many requests are waiting (429).
            EngineDead, EngineDraining, EngineRecovering: the engine accepts no new requests (503).
        """
        builder = self._require_open()
        text, ids = split_prompt(prompt)
        if ids is None:
            assert text is not None
            ids = await builder.require_tokenizer().encode_text_async(text)
            self._require_open()
        if request_id is None:
            request_id = secrets.token_hex(12)
        if request_id in self._processor:
            raise ValueError(f"a request with id {request_id!r} is in flight already")
        request = builder.build_from_ids(
            request_id,
            text,
            ids,
            params,
            priority=priority,
            cache_salt=cache_salt,
            shown_token_ids=shown_token_ids,
            grammar=grammar,
        )
        self._replicas.add_requests(request.children)
        return RequestStream(self._processor.add_request(request), self._abort)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """As `submit`, but its errors are raised by the first item. Leaving the iterator early aborts the request."""
        stream = await self.submit(prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt)
        async with aclosing(stream):
            async for output in stream:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with the finish reason "abort". Unknown ids are ignored."""
        self._abort(request_id)

    def stats(self) -> list[EngineStats]:
        """The latest counters of each replica; never blocks."""
        return self._replicas.stats()

    def state(self) -> State:
        """The engine's state; "recovering" while no replica runs but one restarts, "dead" if none will run again."""
        if self.dead_reason:
            return "dead"
        if self._draining:
            return "draining"
        if self._builder is None:
            return "starting"
        return "ready" if any(self._replicas.alive()) else "recovering"

    def replicas_alive(self) -> list[bool]:
        """For each replica, whether it lives."""
        return self._replicas.alive()

    def num_unfinished(self) -> int:
        """Number of user requests that have not finished."""
        return len(self._processor)

    def drain(self) -> None:
        """Refuse new requests; admitted requests go on."""
        self._draining = True

    async def close(self) -> None:
        """End the engine processes; open streams end with the finish reason "abort"."""
        await self._end_engine("the engine was closed")

    def _require_open(self) -> RequestBuilder:
        if self.dead_reason:
            raise EngineDead(self.dead_reason)
        if self._draining:
            raise EngineDraining("the server is shutting down and takes no new requests")
        if self._builder is None:
            raise EngineDead("the engine is still starting")
        return self._builder

    def _abort(self, request_id: str) -> None:
        aborted = self._processor.abort_request(request_id)
        if aborted is not None:
            state, children = aborted
            self._replicas.abort_requests(children)
            state.on_change()
            state.forget_reader()

    def _on_event(self, index: int, event: EngineEvent) -> None:
        done = self._processor.process_outputs(self._replicas.handle_event(index, event))
        if done.aborts:
            self._replicas.abort_requests(done.aborts)
        self._note_death(self._replicas.dead_reason)
        for state in done.updated:
            state.on_change()
        for state in done.ended:
            state.forget_reader()

    def _note_death(self, reason: str) -> None:
        """Keep the first reason for which the engine is dead; an empty one means that it lives."""
        if reason and not self.dead_reason:
            self.dead_reason = reason
            self._dead.set()

    async def _end_engine(self, reason: str) -> None:
        self._note_death(reason)
        for request_id in self._processor.request_ids():
            self._abort(request_id)
        self._inbox.close()
        await asyncio.get_running_loop().run_in_executor(None, self._replicas.close)
