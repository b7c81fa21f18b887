"""Streams over an engine, for servers: AsyncLLM holds the engine processes and never blocks the event loop."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Literal

from shardline.api.errors import EngineDead, EngineDraining, QueueFull
from shardline.api.front import ModelText, load_model_text
from shardline.api.output_processor import OutputProcessor, RequestState
from shardline.api.replicas import Connect, EngineEvent, Replicas, merge_stats
from shardline.api.requests import Prompt, RequestBuilder, TokensPrompt, split_prompt
from shardline.config.engine import EngineConfig
from shardline.text.chat_template import ChatTemplate
from shardline.text.tokenizer import Tokenizer
from shardline.types import EngineStats, RequestOutput, SamplingParams

State = Literal["starting", "ready", "draining", "dead"]

__all__ = ["AsyncLLM", "EngineDead", "EngineDraining", "Prompt", "QueueFull", "RequestStream", "State", "merge_stats"]

_LONG_TEXT_CHARS = 16_384
"""Longer prompts are tokenized on a thread: about 2 ms, which every other stream would wait."""


class RequestStream:
    """The outputs of one admitted request: `async for output in stream`.

    Each item is the same RequestOutput, grown; updates that nobody has taken yet are merged. Cancelling the task that
    waits for an item, or `aclose`, aborts the request; breaking out of the loop alone does not: use
    `contextlib.aclosing`.
    """

    def __init__(self, output: RequestOutput, abort: Callable[[], None]) -> None:
        self.output = output
        self._abort = abort
        self._updated = asyncio.Event()
        self._ended = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        try:
            await self._updated.wait()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        self._updated.clear()
        self._ended = self.output.finished
        return self.output

    async def aclose(self) -> None:
        """Abort the request where it has not finished; no more items come."""
        self._ended = True
        if not self.output.finished:
            self._abort()

    def notify(self) -> None:
        """Tell the reader that `output` has grown; for AsyncLLM."""
        self._updated.set()


class _Inbox:
    """Brings engine events from the clients' reader threads to the event loop, many with one hop.

    Events that come before `open` wait for it.
    """

    def __init__(self, deliver: Callable[[int, EngineEvent], None]) -> None:
        self._deliver = deliver
        self._events: deque[tuple[int, EngineEvent]] = deque()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hop_pending = False

    def put(self, index: int, event: EngineEvent) -> None:
        """Take an event of replica `index`; on any thread."""
        with self._lock:
            self._events.append((index, event))
            self._hop()

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to deliver, on this loop."""
        with self._lock:
            self._loop = loop
            self._hop()

    def close(self) -> None:
        """Deliver nothing more."""
        with self._lock:
            self._loop = None

    def _hop(self) -> None:
        if self._events and self._loop is not None and not self._hop_pending and not self._loop.is_closed():
            self._hop_pending = True
            self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        with self._lock:
            self._hop_pending = False
            events, self._events = self._events, deque()
        for index, event in events:
            self._deliver(index, event)


class AsyncLLM:
    """An engine with `data_parallel_size` replicas, as streams. All methods belong to one event loop.

    Valid once ready: `tokenizer` (None: only token ids), `chat_template` (None: no chats), `max_model_len` in tokens,
    `fingerprint`, `report` (the engines' start-up lines). `dead_reason` says why the state is "dead".
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        connect: Connect | None = None,
        load_text: Callable[[EngineConfig], ModelText] = load_model_text,
    ) -> None:
        """Start the engine processes at once, without waiting for them; `connect` and `load_text` are for tests.

        Raises:
            ValueError: the configuration cannot be; nothing was started.
        """
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self.chat_template: ChatTemplate | None = None
        self.max_model_len = 0
        self.fingerprint = ""
        self.report: list[str] = []
        self.dead_reason = ""
        self._load_text = load_text
        self._builder: RequestBuilder | None = None
        self._processor = OutputProcessor(None)
        self._streams: dict[str, RequestStream] = {}
        self._draining = False
        self._inbox = _Inbox(self._on_event)
        self._replicas = Replicas(config, self._inbox.put, connect)

    async def wait_ready(self) -> None:
        """Wait until requests can be taken. Where this fails, the engine is closed.

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
            await self._end(str(error) or "the start was cancelled")
            await asyncio.gather(engines, reading, return_exceptions=True)
            raise
        self.tokenizer, self.chat_template = text.tokenizer, text.chat_template
        self.max_model_len = min(one.max_model_len for one in ready)
        self.fingerprint = ready[0].fingerprint
        self.report = [line for one in ready for line in one.report]
        self._processor = OutputProcessor(text.tokenizer)
        self._builder = text.request_builder(self.config, self.max_model_len)
        self._inbox.open(loop)

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestStream:
        """Check and admit a request; the errors below come before any output.

        A replica that dies ends its choices with finish reason "error" and the message as `error`.

        Raises:
            ValueError: the prompt or the parameters cannot be (HTTP 400).
            QueueFull: too many requests wait (429).
            EngineDead, EngineDraining: nothing new is taken (503).
        """
        builder = self._require_open()
        text, ids = split_prompt(prompt)
        if ids is None and text is not None and len(text) > _LONG_TEXT_CHARS:
            _, encoded = await asyncio.to_thread(builder.tokenize, text)
            self._require_open()
            prompt = TokensPrompt(prompt_token_ids=encoded, prompt=text)
        if request_id is None:
            request_id = secrets.token_hex(12)
        if request_id in self._processor:
            raise ValueError(f"a request with id {request_id!r} is in flight already")
        request = builder.build(request_id, prompt, params, priority=priority, cache_salt=cache_salt)
        self._replicas.add(request.children)
        state = self._processor.add(request)
        stream = RequestStream(state.output, lambda: self._abort(request_id))
        self._streams[request_id] = stream
        return stream

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """As `submit`, with its errors on the first item. Leaving the iterator early aborts the request."""
        stream = await self.submit(prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt)
        async with aclosing(stream):
            async for output in stream:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its stream finishes with reason "abort". Unknown ids are ignored."""
        self._abort(request_id)

    def stats(self) -> list[EngineStats]:
        """The latest counters of each replica; never blocks."""
        return self._replicas.stats()

    def state(self) -> State:
        """Where in its life the engine is; "dead" as soon as no replica is left."""
        if self.dead_reason:
            return "dead"
        if self._draining:
            return "draining"
        return "starting" if self._builder is None else "ready"

    def replicas_alive(self) -> list[bool]:
        """Per replica, whether it lives."""
        return self._replicas.alive()

    def num_unfinished(self) -> int:
        """User requests that have not finished; a drained engine has none."""
        return len(self._processor)

    def drain(self) -> None:
        """Refuse new requests; those admitted go on."""
        self._draining = True

    async def close(self) -> None:
        """End the engine processes; open streams finish with reason "abort"."""
        await self._end("the engine was closed")

    def _require_open(self) -> RequestBuilder:
        if self.dead_reason:
            raise EngineDead(self.dead_reason)
        if self._draining:
            raise EngineDraining("the server is shutting down and takes no new requests")
        if self._builder is None:
            raise EngineDead("the engine is still starting")
        return self._builder

    def _abort(self, request_id: str) -> None:
        aborted = self._processor.abort(request_id)
        if aborted is not None:
            state, children = aborted
            self._replicas.abort(children)
            self._notify(state)

    def _on_event(self, index: int, event: EngineEvent) -> None:
        done = self._processor.process(self._replicas.handle(index, event))
        self._replicas.abort(done.aborts)
        self.dead_reason = self.dead_reason or self._replicas.dead_reason
        for state in done.updated:
            self._notify(state)

    def _notify(self, state: RequestState) -> None:
        request_id = state.request.request_id
        stream = self._streams.pop(request_id) if state.output.finished else self._streams[request_id]
        stream.notify()

    async def _end(self, reason: str) -> None:
        self.dead_reason = self.dead_reason or reason
        for request_id in self._processor.request_ids():
            self._abort(request_id)
        self._inbox.close()
        await asyncio.get_running_loop().run_in_executor(None, self._replicas.close)
