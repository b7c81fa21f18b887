"""Writes a response, as a whole or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property

import msgspec

from shardline.api.outputs import RequestOutput
from shardline.server.errors import ApiError
from shardline.server.event_stream import Events
from shardline.server.openai.answer_format import AnswerFormat
from shardline.server.openai.generation import Delta, SentChoice
from shardline.server.openai.logprobs import ChatLogprob, TokenPieces, chat_logprobs
from shardline.server.openai.responses.item_writer import ItemWriter
from shardline.server.openai.responses.output_items import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    ResponseUsage,
)


class ResponseWriter:
    """Writes one response.

    Args:
        response: the response without output.
        keep: called with the response when it has ended.
    """

    def __init__(
        self, response: ResponseObject, answer_format: AnswerFormat, keep: Callable[[ResponseObject], None]
    ) -> None:
        self._response = response
        self._format = answer_format
        self._keep = keep
        self._parser = answer_format.make_parser()
        self._items = ItemWriter(self._parser)
        self._sent = SentChoice()
        self._counter = answer_format.make_counter()
        self._held: list[ChatLogprob] = []
        """Logprobs of tokens whose text the parser still holds back."""

    @cached_property
    def _pieces(self) -> TokenPieces:
        return TokenPieces(self._format.tokenizer)

    def write_whole(self, output: RequestOutput) -> bytes:
        """The JSON of the whole response."""
        self._add_output(output)
        self._items.take_events()
        return msgspec.json.encode(self._response)

    def write_events(self) -> Events:
        """The events of a stream, in OpenAI's order."""
        for name in ("created", "in_progress"):
            self._items.add_event(f"response.{name}", response=self._response)
        while (update := (yield self._items.take_events())) is not None:
            self._add_output(update[1])
        self._items.add_event(f"response.{self._response.status}", response=self._response)
        yield self._items.take_events()

    def write_error(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        self._items.take_events()
        self._response.status = "failed"
        self._response.error = {"code": error.code or "server_error", "message": str(error.detail)}
        self._items.add_event("response.failed", response=self._response)
        return self._items.take_events()

    def _add_output(self, output: RequestOutput) -> None:
        delta = self._sent.take_delta(output.outputs[0], tokens_matter=True)
        if delta is None:
            return
        self._add_answer(delta, output.outputs[0].token_ids)
        if delta.finish_reason is not None:
            self._end_response(output, delta.finish_reason == "stop")

    def _add_answer(self, delta: Delta, token_ids: list[int]) -> None:
        if delta.logprobs is not None:
            # Tokens of reasoning are not reported.
            before = len(token_ids) - len(delta.token_ids)
            skipped = max(0, self._num_reasoning(token_ids) - before)
            new = chat_logprobs(self._pieces, delta.token_ids[skipped:], delta.logprobs[skipped:])
            self._held += new.content
        answers = [self._parser.add_text(delta.text)]
        if delta.finish_reason is not None:
            answers.append(self._parser.end_text(cut=delta.finish_reason != "stop"))
        for answer in answers:
            if answer:
                # Neither are those of calls.
                logprobs, self._held = self._held, []
                self._items.add_answer(answer, logprobs if answer.content else [])

    def _num_reasoning(self, token_ids: list[int]) -> int:
        return 0 if self._counter is None else self._counter.count_tokens(token_ids)

    def _end_response(self, output: RequestOutput, complete: bool) -> None:
        response = self._response
        self._items.end_answer(cut=not complete)
        response.output = self._items.items
        response.status = "completed" if complete else "incomplete"
        response.completed_at = int(time.time())
        if not complete:
            response.incomplete_details = {"reason": "max_output_tokens"}
        token_ids = output.outputs[0].token_ids
        num_input, num_output = len(output.prompt_token_ids), len(token_ids)
        response.usage = ResponseUsage(
            num_input,
            InputTokensDetails(output.num_cached_tokens),
            num_output,
            OutputTokensDetails(self._num_reasoning(token_ids)),
            num_input + num_output,
        )
        self._keep(response)
