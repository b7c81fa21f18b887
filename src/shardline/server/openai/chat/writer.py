"""Writes chat answers, as a whole or in chunks."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from shardline.api.outputs import CompletionOutput, RequestOutput
from shardline.server.openai.answer_format import AnswerFormat
from shardline.server.openai.answer_parts import TokenPieces, Usage, chat_logprobs, usage_of
from shardline.server.openai.chat.parsed import ParsedChoice
from shardline.server.openai.chat.request import ChatRequest
from shardline.server.openai.chat.shapes import AssistantMessage, ChatChoice, ChatDelta, ChatResponse, whole_fields
from shardline.server.openai.generation import Generation, SentChoice
from shardline.server.request_metrics import answer_metrics
from shardline.server.service import Service
from shardline.server.sse import Events, make_event
from shardline.text.answer_parser import ReasoningCounter

_encode_json = msgspec.json.Encoder().encode

_MARK = uuid.uuid4().hex
"""Stands for a text. No client knows it."""


class ChatEnvelope:
    """Encodes the choices of one answer, as a whole or in events."""

    def __init__(self, service: Service, body: ChatRequest, response_id: str, answer_format: AnswerFormat) -> None:
        self._options = body.check_stream(with_usage=service.config.enable_force_include_usage)
        self._id, self._created = body.origin(response_id)
        self._model = service.name_of(body.model)
        self._fingerprint = service.llm.model.fingerprint
        self._with_ids = bool(body.return_token_ids)
        self._with_metrics = bool(body.return_metrics)
        self._prompt_text = answer_format.prompt if body.return_prompt_text else None
        self._counters: list[ReasoningCounter | None] = []
        """One for each choice, if there may be reasoning."""
        if answer_format.reasoning is not None:
            self._counters = [answer_format.make_counter() for _ in range(body.n or 1)]

    @property
    def counts_always(self) -> bool:
        """Whether each event has the usage so far."""
        return self._options.counts_always

    def encode_whole(self, output: RequestOutput, choices: Sequence[ChatChoice]) -> bytes:
        """The JSON of the whole answer."""
        return self._encode(
            "chat.completion",
            choices,
            self._usage([output]),
            output.prompt_token_ids if self._with_ids else None,
            [output],
            **whole_fields(output, self._prompt_text),
        )

    def encode_event(self, outputs: Sequence[RequestOutput], choice: ChatChoice, *, first: bool = False) -> bytes:
        """An event with what is new of a choice. The `first` one of each choice also has the prompt's ids and text."""
        usage: Usage | msgspec.UnsetType | None = None if self._options.include_usage else msgspec.UNSET
        if self._options.counts_always:
            usage = self._usage(outputs)
        fields: dict[str, Any] = {"prompt_text": self._prompt_text} if first and self._prompt_text is not None else {}
        prompt_ids = outputs[0].prompt_token_ids if first and self._with_ids else msgspec.UNSET
        return make_event(self._encode("chat.completion.chunk", [choice], usage, prompt_ids, **fields))

    def encode_ending(self, outputs: Sequence[RequestOutput]) -> bytes:
        """An event with the usage and the metrics; empty if the request asked for neither."""
        if not (self._options.include_usage or self._with_metrics):
            return b""
        usage = self._usage(outputs) if self._options.include_usage else msgspec.UNSET
        return make_event(self._encode("chat.completion.chunk", [], usage, finished=outputs))

    def _usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        if not self._counters:
            return usage_of(outputs)
        [output] = outputs
        pairs = zip(self._counters, output.outputs, strict=True)
        return usage_of(outputs, sum(counter.count_tokens(choice.token_ids) for counter, choice in pairs if counter))

    def _encode(
        self,
        kind: str,
        choices: Sequence[ChatChoice],
        usage: Usage | msgspec.UnsetType | None,
        prompt_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET,
        finished: Sequence[RequestOutput] = (),
        **fields: Any,
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
                metrics=answer_metrics(finished) if self._with_metrics and finished else msgspec.UNSET,
                **fields,
            )
        )


class StreamedChoice(SentChoice):
    """How much of one choice has been sent, and what is used again for each of its events.

    A frame is what surrounds the texts in an event that has nothing but them. It is encoded once.
    """

    __slots__ = ("content_frame", "parsed", "reasoning_frame")

    def __init__(self) -> None:
        super().__init__()
        self.parsed: ParsedChoice | None = None
        """None: all text is content."""
        self.content_frame: list[bytes] | None = None
        self.reasoning_frame: list[bytes] | None = None


class ChatWriter:
    """Writes the answer to one request, as a whole or in chunks."""

    def __init__(self, service: Service, body: ChatRequest, response_id: str, answer_format: AnswerFormat) -> None:
        self._envelope = ChatEnvelope(service, body, response_id, answer_format)
        self._with_reasoning = body.include_reasoning is not False
        # Tokens would tell the reasoning that the answer leaves out.
        hides_tokens = not self._with_reasoning and answer_format.reasoning is not None
        self._with_ids = bool(body.return_token_ids) and not hides_tokens
        self._with_logprobs = bool(body.logprobs) and not hides_tokens
        self._with_digests = bool(body.logits_digest)
        self._with_receipt = not hides_tokens
        self.takes_long = bool(body.logprobs)
        """Whether a whole answer must not be written on the event loop."""
        self._tokens_matter = self._with_ids or self._with_logprobs or self._with_digests
        asked = body.return_tokens_as_token_ids
        self._tokens_as_ids = service.config.return_tokens_as_token_ids if asked is None else asked
        self._tokenizer = service.llm.model.tokenizer
        self._role = body.answer_role or service.config.response_role
        self._echo = body.echoed_text if body.echo else ""
        self._parsed_format: AnswerFormat | None = answer_format
        """None: all text is content."""
        if answer_format.tool_use is None and answer_format.reasoning is None:
            self._parsed_format = None
        self._num_choices = body.n or 1

    @cached_property
    def _pieces(self) -> TokenPieces:
        return TokenPieces(self._tokenizer, as_ids=self._tokens_as_ids)

    def write_whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The JSON of the whole answer, of the output of the one prompt."""
        [output] = outputs
        choices = []
        for choice in output.outputs:
            delta = SentChoice().take_delta(choice, tokens_matter=True)
            assert delta is not None
            reason: str | None = delta.finish_reason
            if self._parsed_format is None:
                message = AssistantMessage(role=self._role, content=self._echo + delta.text)
            else:
                parsed = ParsedChoice(self._parsed_format, with_reasoning=self._with_reasoning)
                message = parsed.read_whole(delta, self._role, self._echo)
                reason = parsed.finish_reason(delta)
            whole = self._make_choice(choice.index, delta, message=message)
            choices.append(self._end_choice(whole, delta, reason))
        return self._envelope.encode_whole(output, choices)

    def write_chunks(self, generation: Generation) -> Events:
        """The events of a stream: for each choice its role, then pieces of its content, then its finish reason."""
        sent = [StreamedChoice() for _ in range(self._num_choices)]
        if self._parsed_format is not None:
            for streamed in sent:
                streamed.parsed = ParsedChoice(self._parsed_format, with_reasoning=self._with_reasoning)
        only_text = not (self._tokens_matter or self._envelope.counts_always)
        outputs, encode_event = generation.outputs, self._envelope.encode_event
        begin, echo = ChatDelta(self._role, ""), ChatDelta(content=self._echo)
        body = b"".join(
            [encode_event(outputs, ChatChoice(index=index, delta=begin), first=True) for index in range(len(sent))]
        )
        if self._echo:
            body += b"".join([encode_event(outputs, ChatChoice(index=index, delta=echo)) for index in range(len(sent))])
        while (update := (yield body)) is not None:
            body = b""
            for choice in update[1].outputs:
                streamed = sent[choice.index]
                if only_text and choice.finish_reason is None:
                    text = streamed.take_text(choice)
                    if text and streamed.parsed is None and streamed.content_frame is not None:
                        body += _encode_json(text).join(streamed.content_frame)  # without the call below
                    elif text:
                        body += self._write_text(outputs, choice.index, streamed, text)
                    continue
                delta = streamed.take_delta(choice, tokens_matter=self._tokens_matter)
                if delta is None:
                    continue
                parts = (
                    self._split_delta(choice.index, delta)
                    if streamed.parsed is None
                    else self._split_parsed(choice.index, delta, streamed.parsed)
                )
                body += b"".join([encode_event(outputs, part) for part in parts])
        yield self._envelope.encode_ending(outputs)

    def _write_text(self, outputs: Sequence[RequestOutput], index: int, choice: StreamedChoice, text: str) -> bytes:
        """An event with what a piece of text adds; empty if the parser holds it back."""
        if choice.parsed is None:
            return self._write_content(outputs, index, choice, text)
        delta = choice.parsed.add_text(text)
        if delta is None:
            return b""
        if delta.tool_calls or (delta.reasoning and delta.content):
            return self._envelope.encode_event(outputs, ChatChoice(index=index, delta=delta, token_ids=None))
        if delta.content:
            return self._write_content(outputs, index, choice, delta.content)
        if choice.reasoning_frame is None:
            frame = ChatDelta(reasoning=_MARK, reasoning_content=_MARK)
            choice.reasoning_frame = self._make_frame(outputs, index, frame)
        return _encode_json(delta.reasoning).join(choice.reasoning_frame)

    def _write_content(self, outputs: Sequence[RequestOutput], index: int, choice: StreamedChoice, text: str) -> bytes:
        """An event that has nothing but content."""
        if choice.content_frame is None:
            choice.content_frame = self._make_frame(outputs, index, ChatDelta(content=_MARK))
        return _encode_json(text).join(choice.content_frame)

    def _make_frame(self, outputs: Sequence[RequestOutput], index: int, delta: ChatDelta) -> list[bytes]:
        """What surrounds the texts of an event that has `delta`, in which each text is `_MARK`."""
        event = self._envelope.encode_event(outputs, ChatChoice(index=index, delta=delta, token_ids=None))
        return event.split(b'"' + _MARK.encode() + b'"')

    def _split_delta(self, index: int, delta: CompletionOutput) -> list[ChatChoice]:
        """A chunk with the new content, and with the finish reason, if the choice ended."""
        parts = [self._make_choice(index, delta, delta=ChatDelta(content=delta.text))]
        return parts if delta.finish_reason is None else self._with_end(parts, delta, delta.finish_reason)

    def _split_parsed(self, index: int, delta: CompletionOutput, parsed: ParsedChoice) -> list[ChatChoice]:
        """As `_split_delta`, of an answer that is parsed."""
        has_tokens = self._tokens_matter and bool(delta.token_ids)
        deltas = parsed.split(delta, has_tokens=has_tokens)
        parts = [self._without_tokens(index, part) for part in deltas]
        if has_tokens:
            parts[0] = self._make_choice(index, delta, delta=deltas[0])
        if delta.finish_reason is None:
            return parts
        parts = parts or [self._without_tokens(index, ChatDelta())]
        return self._with_end(parts, delta, parsed.finish_reason(delta))

    def _without_tokens(self, index: int, delta: ChatDelta) -> ChatChoice:
        """A part of a chunk whose tokens another part has."""
        return ChatChoice(index=index, delta=delta, token_ids=[] if self._with_ids else None)

    def _make_choice(self, index: int, new: CompletionOutput, **fields: Any) -> ChatChoice:
        """A choice with the new tokens and these other fields."""
        scores = new.token_logprobs if self._with_logprobs else None
        return ChatChoice(
            index=index,
            logprobs=None if scores is None else chat_logprobs(self._pieces, new.token_ids, scores),
            token_ids=new.token_ids if self._with_ids else None,
            logits_digests=new.digests if self._with_digests and new.digests is not None else msgspec.UNSET,
            **fields,
        )

    def _with_end(self, parts: list[ChatChoice], delta: CompletionOutput, reason: str | None) -> list[ChatChoice]:
        """The last chunks of a choice: the finish reason is in the last of them that has content, as in vLLM."""
        *before, last = parts
        return [*before, self._end_choice(last, delta, reason)]

    def _end_choice(self, last: ChatChoice, delta: CompletionOutput, reason: str | None) -> ChatChoice:
        receipt = (self._with_receipt and delta.receipt) or msgspec.UNSET
        return msgspec.structs.replace(last, finish_reason=reason, stop_reason=delta.stop_reason, receipt=receipt)
