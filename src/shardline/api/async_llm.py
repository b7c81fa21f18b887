"""AsyncLLM: an engine whose outputs are streams, for servers. It never blocks the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Literal

from shardline.api.adapters import LoRARequest
from shardline.api.engines import Connect, EngineEvent
from shardline.api.errors import EngineDead, EngineDraining
from shardline.api.model_text import ModelText, ReadyModel, load_model_text
from shardline.api.outputs import Deltas, RequestOutput
from shardline.api.prompts import Prompt
from shardline.api.replicas import Replicas
from shardline.api.resume import PromptSoFar
from shardline.api.streams import Inbox, RequestStream, Streams
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment
from shardline.messages.request import AdapterRef
from shardline.messages.stats import EngineStats
from shardline.messages.worker import RankReport
from shardline.sampling_params import RequestOutputKind, SamplingParams
from shardline.structured.checks import GrammarChecks

State = Literal["starting", "ready", "recovering", "draining", "dead"]


class AsyncLLM:
    """An engine with `data_parallel_size` replicas. All methods must be called on one event loop.

    `async with AsyncLLM(config) as llm` waits until it is ready, and closes it. `grammars` writes and checks
    grammars. `dead_reason` says why the state is "dead".
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
        if not isinstance(config, EngineConfig):
            raise ValueError(f"AsyncLLM takes EngineConfig.from_options(model=...), not {config!r:.80}")
        self.grammars = GrammarChecks()
        self.dead_reason = ""
        self._dead = asyncio.Event()
        self._load_text = load_text
        self._ready: ReadyModel | None = None
        self._draining = False
        self._inbox = Inbox(self._on_event)
        self._replicas = Replicas(config, self._inbox.put_event, connect)
        self.config = dataclasses.replace(config, cache=self._replicas.config.cache)

    @property
    def model(self) -> ReadyModel:
        """What the engine serves.

        Raises:
            EngineDead: the engine is still starting.
        """
        if self._ready is None:
            raise EngineDead("the engine is still starting; await wait_ready()")
        return self._ready

    async def wait_ready(self) -> None:
        """Wait until the engine accepts requests. If this fails, the engine is closed.

        Raises:
            ValueError: the configuration is at fault.
            RuntimeError: the engine failed.
        """
        if self._ready is not None:
            return
        loop = asyncio.get_running_loop()
        engines = loop.run_in_executor(None, self._replicas.wait_ready)
        reading = loop.run_in_executor(None, self._load_text, self._replicas.config)
        try:
            ready, text, _ = await asyncio.gather(engines, reading, self.grammars.start())
        except BaseException as error:
            await self.close(str(error) or "the start was cancelled")
            await asyncio.gather(engines, reading, return_exceptions=True)
            raise
        self._ready = text.ready_model(self.config, ready, Streams(self._replicas, text.tokenizer))
        self._inbox.open(loop)

    async def __aenter__(self) -> AsyncLLM:
        await self.wait_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def wait_dead(self) -> None:
        """Wait until the state is "dead"."""
        await self._dead.wait()

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
        adapter: AdapterRef | None = None,
        so_far: PromptSoFar | None = None,
    ) -> RequestStream:
        """Check and admit a request; the errors below are raised before any output.

        `shown_token_ids`, `grammar`, `adapter` and `so_far`: see `RequestBuilder.build_request`.

        If its replica fails, the choices go on at another replica, or when one has started again. If that is
        impossible, they end with the finish reason "error" and the message as `error`.

        Raises:
            ValueError: the prompt or the parameters are invalid (HTTP 400).
            QueueFull: too many requests are waiting (429).
            EngineDead, EngineDraining, EngineRecovering: the engine accepts no new requests (503).
        """
        model = self.require_open()
        prompt = await model.builder.encode_prompt(prompt)
        self.require_open()
        if request_id is None:
            request_id = secrets.token_hex(12)
        if request_id in model.streams:
            raise ValueError(f"a request with id {request_id!r} is in flight already")
        if params.structured_outputs is not None and not grammar:
            grammar = await self.grammars.write_grammar(params.structured_outputs)
            self.require_open()
        request = model.builder.build_request(
            request_id,
            prompt,
            params,
            priority=priority,
            cache_salt=cache_salt,
            shown_token_ids=shown_token_ids,
            grammar=grammar,
            adapter=adapter,
            so_far=so_far,
        )
        return model.streams.open(request)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """As `submit`, but its errors are raised by the first item. Leaving the iterator early aborts the request.

        `sampling_params.output_kind` says what each output has.
        """
        if not isinstance(sampling_params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, not {sampling_params!r:.80}")
        adapter = None
        if lora_request is not None:
            adapter = await asyncio.to_thread(self.model.adapters.read, lora_request.lora_path)
        stream = await self.submit(
            prompt, sampling_params, request_id=request_id, priority=priority, cache_salt=cache_salt, adapter=adapter
        )
        kind, deltas = sampling_params.output_kind, Deltas()
        async with contextlib.aclosing(stream):
            async for output in stream:
                if kind is RequestOutputKind.DELTA:
                    yield deltas.take(output)
                elif kind is RequestOutputKind.CUMULATIVE or output.finished:
                    yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with the finish reason "abort". Unknown ids are ignored."""
        if self._ready is not None:
            self._ready.streams.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Let later requests find nothing in the prefix caches that is there now."""
        self._replicas.reset_prefix_cache()

    def num_refused(self) -> int:
        """Requests that were refused because too many were waiting."""
        return self._replicas.num_refused

    def stats(self) -> list[EngineStats]:
        """The latest counters of each replica; never blocks."""
        return self._replicas.stats()

    def state(self) -> State:
        """The engine's state; "recovering" while no replica runs but one restarts, "dead" if none will run again."""
        if self.dead_reason:
            return "dead"
        if self._draining:
            return "draining"
        if self._ready is None:
            return "starting"
        return "ready" if any(self._replicas.alive()) else "recovering"

    def replicas_alive(self) -> list[bool]:
        """For each replica, whether it lives."""
        return self._replicas.alive()

    @property
    def deployment(self) -> Deployment | None:
        """What runs where; None: the engines are not real ones."""
        return self._replicas.deployment

    def ranks(self) -> list[list[RankReport]]:
        """For each engine, what its ranks said when they were ready; empty while engines start."""
        return self._replicas.ranks()

    def drain(self) -> None:
        """Refuse new requests; admitted requests go on."""
        self._draining = True

    async def close(self, reason: str = "the engine was closed") -> None:
        """End the engine processes; open streams end with the finish reason "abort". May be called again.

        `reason` is the `dead_reason` of an engine that is not dead yet.
        """
        self._note_death(reason)
        self._inbox.close()
        self.grammars.close()
        if self._ready is not None:
            self._ready.streams.abort_all()
            if self._ready.chat_template is not None:
                self._ready.chat_template.close()
        await asyncio.get_running_loop().run_in_executor(None, self._replicas.close)

    def require_open(self) -> ReadyModel:
        """What the engine serves.

        Raises:
            EngineDead, EngineDraining: it accepts no requests.
        """
        if self.dead_reason:
            raise EngineDead(self.dead_reason)
        if self._draining:
            raise EngineDraining("the server is shutting down and takes no new requests")
        return self.model

    def _on_event(self, index: int, event: EngineEvent) -> None:
        assert self._ready is not None  # the inbox delivers from then on
        outputs = self._replicas.handle_event(index, event)
        self._note_death(self._replicas.dead_reason)  # readers ask for it
        self._ready.streams.add_outputs(outputs)

    def _note_death(self, reason: str) -> None:
        """Keep the first reason for which the engine is dead; an empty one means that it lives."""
        if reason and not self.dead_reason:
            self.dead_reason = reason
            self._dead.set()
