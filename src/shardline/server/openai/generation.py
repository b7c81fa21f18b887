"""One API request as engine requests, one for each prompt, and their outputs as one sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from shardline.api.errors import RequestDiffers
from shardline.api.outputs import CompletionOutput, RequestOutput
from shardline.api.resume import PromptSoFar
from shardline.api.streams import RequestStream, watch_finish
from shardline.sampling_params import SamplingParams
from shardline.server.errors import answer_failed, bad_request, engine_dead
from shardline.server.observer import ObservedRequest
from shardline.server.openai.engine_errors import as_api_error
from shardline.server.resume import Resume, add_marks, begin_resume, request_differs
from shardline.server.service import Service
from shardline.server.sse import Events

if TYPE_CHECKING:
    from shardline.api.prompts import EncodedPrompt


usual_priority: ContextVar[int] = ContextVar("usual_priority", default=0)
"""The priority of requests that do not say theirs."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request as the engine takes it."""

    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    own_params: Sequence[SamplingParams] = ()
    """Those of each prompt; empty: all have `params`."""
    param: str
    """The field of the request with the prompts."""
    grammar: str = ""
    """Of all outputs; empty: they may be any text."""
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens that are part of the text even if others are skipped."""

    @property
    def has_form(self) -> bool:
        """Whether the outputs cannot be any text."""
        return bool(self.grammar)


class Generation:
    """The admitted requests of one API request.

    Use it as an async context manager: leaving it aborts unfinished requests and records the metrics.
    """

    __slots__ = ("_all_finished", "_llm", "_observed", "_resume", "_streams", "_timers")

    def __init__(self, service: Service, observed: ObservedRequest, resume: Resume | None) -> None:
        self._llm = service.llm
        self._observed = observed
        self._streams: list[RequestStream] = []
        self._all_finished: Callable[[], bool] = bool  # until all prompts are admitted
        self._timers = observed.timers
        self._resume = resume

    @classmethod
    async def start(
        cls,
        service: Service,
        prepared: Prepared,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        model: str | None = None,
        resume: Resume | None = None,
    ) -> Generation:
        """Admit all prompts, or none.

        `model`: the name that the request gives; it may be that of an adapter. `resume`: what another server has sent
        of the answer; None: `mark` adds none.

        Raises:
            ApiError: 400, a prompt or a parameter is invalid; 404, the model is not served; 409, the other server gave
                other answers; 429, the queue is full; 503, the engine accepts nothing.
        """
        prompts, own = prepared.prompts, prepared.own_params or [prepared.params] * len(prepared.prompts)
        adapter = service.require_model(model)
        limit, first = service.llm.config.scheduler.max_num_waiting, own[0]
        if len(prompts) * first.n > limit:
            raise bad_request(
                f"The request asks for {len(prompts) * first.n} choices ({len(prompts)} prompts, n={first.n}); at "
                f"most {limit} are taken in one request (--max-num-waiting).",
                prepared.param,
            )
        so_far: Sequence[PromptSoFar | None] = [None] * len(prompts)
        if resume is not None:
            so_far = begin_resume(resume, request_id, service.llm.model.contract.sha256, len(prompts)) or so_far
        observed = service.observer.start(request_id, first, service.llm.model.max_model_len)
        generation = cls(service, observed, resume)
        try:
            for index, prompt in enumerate(prompts):
                if index:
                    await asyncio.sleep(0)  # many prompts must not keep other streams waiting
                observed.add_prompt()
                stream = await service.llm.submit(
                    prompt,
                    own[index],
                    request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
                    priority=priority or usual_priority.get(),
                    cache_salt=cache_salt,
                    shown_token_ids=prepared.shown_token_ids,
                    grammar=prepared.grammar,
                    adapter=adapter,
                    so_far=so_far[index],
                )
                generation._streams.append(stream)
        except BaseException as error:
            await generation.aclose()
            if isinstance(error, RequestDiffers):
                raise request_differs(error) from error
            answer = as_api_error(error, prepared.param)
            if answer is None:
                raise
            raise answer from error
        observed.admit(generation._streams)
        generation._all_finished = watch_finish(generation._streams)
        return generation

    def mark(self, events: Events) -> Events:
        """The events of the answer, with marks if the request asks for them."""
        return events if self._resume is None else add_marks(events, self._streams, self._resume)

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
        """Abort unfinished requests, and record the metrics and where the time went; may be called again."""
        self._observed.stop_timers()
        for stream in self._streams:
            await stream.aclose()
        self._observed.end()

    @property
    def finished(self) -> bool:
        """Whether every output is whole."""
        return self._all_finished()

    def listen(self, on_update: Callable[[int, RequestOutput], None] | None) -> None:
        """Call `on_update` with the index of a prompt and its output so far, each time that the output changes.

        An output that has changed already counts as changed now. None: call nothing any more. `on_update` must pass
        each output to `observe` and must not raise.
        """
        for index, stream in enumerate(self._streams):
            stream.listen(None if on_update is None else partial(on_update, index, stream.output))

    def observe(self, index: int, output: RequestOutput) -> None:
        """Measure an update.

        Raises:
            ApiError: as `check`.
        """
        timer = self._timers[index]
        timer.observe_output(output)
        if output.finished:  # now, since a thousand prompts at the end would keep other streams waiting
            timer.finish()
        self._check_output(output)

    def check(self) -> None:
        """Find out whether the request has failed.

        Raises:
            ApiError: 400, what it asks for cannot be answered; 503, the engine has died; 500, it gave up.
        """
        for output in self.outputs:
            self._check_output(output)

    def _check_output(self, output: RequestOutput) -> None:
        for choice in output.outputs:
            if choice.finish_reason == "error":
                if choice.refused:
                    raise bad_request(f"The answer could not be completed: {choice.error}", code="answer_refused")
                raise answer_failed(choice.error) if all(self._llm.replicas_alive()) else engine_dead(choice.error)


class SentChoice:
    """How much of one choice has been sent."""

    __slots__ = ("finished", "num_chars", "num_tokens")

    def __init__(self) -> None:
        self.num_chars = 0
        self.num_tokens = 0
        self.finished = False

    def take_text(self, output: CompletionOutput) -> str:
        """The text that is new in an output that has not ended; it counts as sent from now on."""
        text = output.text[self.num_chars :]
        if text:
            self.num_chars += len(text)
            self.num_tokens = len(output.token_ids)
        return text

    def take_delta(self, output: CompletionOutput, *, tokens_matter: bool) -> CompletionOutput | None:
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
        return msgspec.structs.replace(
            output,
            text=text,
            token_ids=output.token_ids[first:],
            token_logprobs=output.token_logprobs and output.token_logprobs[first:],
            digests=output.digests and output.digests[first:],
        )
