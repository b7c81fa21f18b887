"""One API request as engine requests, one for each prompt, and their outputs as one sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from shardline.api.errors import ContextLengthExceeded, EngineDead, EngineDraining, QueueFull
from shardline.sampling_params import SamplingParams
from shardline.server.errors import ApiError, bad_request
from shardline.server.openai.protocol import bad_parameter
from shardline.server.service import Service, draining, engine_dead
from shardline.types import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs

if TYPE_CHECKING:
    from shardline.api.async_llm import Prompt, RequestStream
    from shardline.metrics.requests import RequestTimer

RETRY_QUEUE_FULL_SECONDS = 1


class Generation:
    """The admitted requests of one API request.

    Use it as an async context manager: leaving it aborts unfinished requests and records the metrics.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._streams: list[RequestStream] = []
        self._timers: list[RequestTimer] = []

    @classmethod
    async def start(
        cls,
        service: Service,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        request_id: str,
        prompt_param: str,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Generation:
        """Admit all prompts, or none; `prompt_param` is the field of the request that contained them.

        Raises:
            ApiError: 400, a prompt or a parameter is invalid; 429, the queue is full; 503, the engine accepts nothing.
        """
        most = service.llm.config.scheduler.max_num_waiting
        if len(prompts) * params.n > most:
            raise bad_request(
                f"The request asks for {len(prompts) * params.n} choices ({len(prompts)} prompts, n={params.n}); at "
                f"most {most} are taken in one request (--max-num-waiting).",
                prompt_param,
            )
        generation = cls(service)
        try:
            for index, prompt in enumerate(prompts):
                timer = service.metrics.start_timer(params.n)
                stream = await service.llm.submit(
                    prompt,
                    params,
                    request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
                    priority=priority,
                    cache_salt=cache_salt,
                )
                generation._streams.append(stream)
                generation._timers.append(timer)
        except BaseException as error:
            await generation.aclose()
            answer = _as_api_error(error, prompt_param)
            if answer is None:
                raise
            raise answer from error
        return generation

    @property
    def outputs(self) -> list[RequestOutput]:
        """For each prompt, its output so far."""
        return [stream.output for stream in self._streams]

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort unfinished requests and record the metrics; may be called again."""
        streams, timers = self._streams, self._timers
        self._timers = []
        for timer in timers:
            timer.finish()
        for stream in streams:
            await stream.aclose()

    async def updates(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(Prompt index, output so far), each time an output changes.

        Raises:
            ApiError: 503, the engine has died.
        """
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                self._check_output(0, output)
                yield 0, output
            return
        # One slot for each prompt: if the reader is slow, the forwarders wait, and the streams merge their updates.
        queue: asyncio.Queue[int | BaseException | None] = asyncio.Queue(len(self._streams))
        forwarders = [asyncio.create_task(self._forward_updates(index, queue)) for index in range(len(self._streams))]
        try:
            running = len(forwarders)
            while running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                    continue
                output = self._streams[item].output
                self._check_output(item, output)
                yield item, output
        finally:
            for forwarder in forwarders:
                forwarder.cancel()
            await asyncio.gather(*forwarders, return_exceptions=True)

    async def wait_finished(self) -> list[RequestOutput]:
        """For each prompt, the whole output.

        Raises:
            ApiError: 503, the engine has died.
        """
        async for _ in self.updates():
            pass
        return self.outputs

    async def _forward_updates(self, index: int, queue: asyncio.Queue[int | BaseException | None]) -> None:
        try:
            async for _ in self._streams[index]:
                await queue.put(index)
        except Exception as error:  # the reader raises it again
            await queue.put(error)
        await queue.put(None)

    def _check_output(self, index: int, output: RequestOutput) -> None:
        self._timers[index].observe_output(output)
        for choice in output.outputs:
            if choice.finish_reason == "error":
                raise engine_dead(choice.error)


def _as_api_error(error: BaseException, prompt_param: str) -> ApiError | None:
    """The answer to a request that was not admitted. None: the error is not meant for clients."""
    if isinstance(error, EngineDraining):
        return draining()
    if isinstance(error, EngineDead):
        return engine_dead(str(error))
    if isinstance(error, QueueFull):
        return ApiError(
            429, str(error), type="rate_limit_error", code="rate_limit_exceeded", retry_after=RETRY_QUEUE_FULL_SECONDS
        )
    if isinstance(error, ContextLengthExceeded):
        return bad_request(str(error), prompt_param, "context_length_exceeded")
    if isinstance(error, ValueError):
        return bad_parameter(str(error))
    return None


@dataclass
class Delta:
    """What has been added to one choice since the last delta."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    digests: list[str] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class SentChoice:
    """How much of one choice has been sent."""

    __slots__ = ("finished", "num_chars", "num_tokens")

    def __init__(self) -> None:
        self.num_chars = 0
        self.num_tokens = 0
        self.finished = False

    def take_delta(self, output: CompletionOutput, *, tokens_matter: bool) -> Delta | None:
        """What is new in `output`; it counts as sent from now on. None: nothing is new.

        Tokens without text, such as half a character, are new only if `tokens_matter`.
        """
        if self.finished:
            return None
        text = output.text[self.num_chars :]
        first = self.num_tokens
        grown = tokens_matter and len(output.token_ids) > first
        if not (text or grown or output.finish_reason is not None):
            return None
        self.num_chars += len(text)
        self.num_tokens = len(output.token_ids)
        self.finished = output.finish_reason is not None
        return Delta(
            text,
            output.token_ids[first:],
            None if output.logprobs is None else output.logprobs[first : self.num_tokens],
            None if output.digests is None else output.digests[first : self.num_tokens],
            output.finish_reason,
            output.stop_reason,
        )
