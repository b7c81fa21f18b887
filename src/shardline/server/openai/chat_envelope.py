"""What surrounds the choices of a chat answer: its id, its model, its usage and its metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from shardline.api.outputs import Logprob, RequestOutput
from shardline.server.event_stream import make_event
from shardline.server.openai.answer_format import AnswerFormat
from shardline.server.openai.chat_response import ChatChoice, ChatResponse
from shardline.server.openai.usage import Usage, usage_of
from shardline.server.request_log import answer_metrics
from shardline.server.service import Service

if TYPE_CHECKING:
    from shardline.server.openai.chat import ChatRequest


class ChatEnvelope:
    """Encodes the choices of one answer, as a whole or in events."""

    def __init__(self, service: Service, body: ChatRequest, response_id: str, answer_format: AnswerFormat) -> None:
        self._options = body.check_stream()
        self._id = response_id
        self._created = int(time.time())
        self._model = service.model_names[0]
        self._fingerprint = service.llm.fingerprint
        self._with_ids = bool(body.return_token_ids)
        self._with_prompt_logprobs = body.prompt_logprobs is not None
        self._with_metrics = bool(body.return_metrics)
        self._counters = [answer_format.make_counter() for _ in range(body.n or 1)]

    def encode_whole(self, output: RequestOutput, choices: Sequence[ChatChoice]) -> bytes:
        """The JSON of the whole answer."""
        return self._encode(
            "chat.completion",
            choices,
            self._usage([output]),
            self._prompt_ids(output),
            output.prompt_logprobs if self._with_prompt_logprobs else msgspec.UNSET,
            [output],
        )

    def encode_event(self, outputs: Sequence[RequestOutput], choice: ChatChoice, *, first: bool = False) -> bytes:
        """An event with what is new of a choice. The `first` one of each choice also has the prompt's ids."""
        usage: Usage | msgspec.UnsetType | None = None if self._options.include_usage else msgspec.UNSET
        if self._options.continuous_usage_stats:
            usage = self._usage(outputs)
        prompt_ids = self._prompt_ids(outputs[0]) if first else msgspec.UNSET
        return make_event(self._encode("chat.completion.chunk", [choice], usage, prompt_ids))

    def encode_ending(self, outputs: Sequence[RequestOutput]) -> bytes:
        """An event with the usage and the metrics; empty if the request asked for neither."""
        if not (self._options.include_usage or self._with_metrics):
            return b""
        usage = self._usage(outputs) if self._options.include_usage else msgspec.UNSET
        return make_event(self._encode("chat.completion.chunk", [], usage, finished=outputs))

    def _prompt_ids(self, output: RequestOutput) -> list[int] | msgspec.UnsetType:
        return output.prompt_token_ids if self._with_ids else msgspec.UNSET

    def _usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        if all(counter is None for counter in self._counters):
            return usage_of(outputs)
        [output] = outputs
        pairs = zip(self._counters, output.outputs, strict=True)
        return usage_of(outputs, sum(counter.count_tokens(choice.token_ids) for counter, choice in pairs if counter))

    def _encode(
        self,
        kind: str,
        choices: Sequence[ChatChoice],
        usage: Usage | msgspec.UnsetType | None,
        prompt_ids: list[int] | msgspec.UnsetType = msgspec.UNSET,
        prompt_logprobs: list[dict[int, Logprob] | None] | msgspec.UnsetType | None = msgspec.UNSET,
        finished: Sequence[RequestOutput] = (),
    ) -> bytes:
        return msgspec.json.encode(
            ChatResponse(
                id=self._id,
                object=kind,
                created=self._created,
                model=self._model,
                system_fingerprint=self._fingerprint,
                choices=choices,
                usage=usage,
                prompt_token_ids=prompt_ids,
                prompt_logprobs=prompt_logprobs,
                metrics=answer_metrics(finished) if self._with_metrics and finished else msgspec.UNSET,
            )
        )
