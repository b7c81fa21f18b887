"""Writes chat answers, as a whole or in chunks."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from shardline.api.outputs import Logprob, RequestOutput
from shardline.receipts.receipt import Receipt
from shardline.server.observer import answer_metrics
from shardline.server.openai.answer_format import AnswerFormat
from shardline.server.openai.answer_parts import ChatLogprobs, TokenPieces, Usage, chat_logprobs, usage_of
from shardline.server.openai.chat.request import ChatRequest
from shardline.server.openai.generation import Delta, Generation, SentChoice
from shardline.server.service import Service
from shardline.server.sse import Events, make_event
from shardline.text.answer_parser import AnswerParser
from shardline.text.tool_parsers.base import AnswerDelta, CallDelta

_encode_json = msgspec.json.Encoder().encode

_MARK = uuid.uuid4().hex
"""Stands for a text. No client knows it."""


class FunctionCall(msgspec.Struct, kw_only=True, frozen=True):
    """The called function; in a chunk, what is new in it."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str
    """JSON text."""


class CustomCall(msgspec.Struct, kw_only=True, frozen=True):
    """The called custom tool; in a chunk, what is new in it."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    input: str


class ToolCall(msgspec.Struct, kw_only=True, frozen=True):
    """A tool call; in a chunk, what is new in it. `index` is the number of the call, in chunks only."""

    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
    function: FunctionCall | msgspec.UnsetType = msgspec.UNSET
    custom: CustomCall | msgspec.UnsetType = msgspec.UNSET


class AssistantMessage(msgspec.Struct, kw_only=True, frozen=True):
    """The message of a whole answer."""

    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    """The same as `reasoning`, under the name that older clients know."""
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(msgspec.Struct, kw_only=True, frozen=True):
    """One choice: `message` in a whole answer, `delta` in a chunk. The digests are there only on request."""

    index: int
    message: AssistantMessage | msgspec.UnsetType = msgspec.UNSET
    delta: ChatDelta | msgspec.UnsetType = msgspec.UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    logits_digests: list[str] | msgspec.UnsetType = msgspec.UNSET
    receipt: Receipt | msgspec.UnsetType = msgspec.UNSET


class ChatResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The whole answer, or a chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[ChatChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    service_tier: msgspec.UnsetType | None = msgspec.UNSET
    kv_transfer_params: msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_text: str | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: list[dict[int, Logprob] | None] | msgspec.UnsetType | None = msgspec.UNSET
    metrics: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class ChatEnvelope:
    """Encodes the choices of one answer, as a whole or in events."""

    def __init__(self, service: Service, body: ChatRequest, response_id: str, answer_format: AnswerFormat) -> None:
        self._options = body.check_stream(with_usage=service.config.enable_force_include_usage)
        self._id, self._created = body.origin(response_id)
        self._model = service.name_of(body.model)
        self._fingerprint = service.llm.model.fingerprint
        self._with_ids = bool(body.return_token_ids)
        self._with_prompt_logprobs = body.prompt_logprobs is not None
        self._with_metrics = bool(body.return_metrics)
        self._prompt_text = answer_format.prompt if body.return_prompt_text else None
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
            prompt_logprobs=output.prompt_logprobs if self._with_prompt_logprobs else None,
            prompt_text=self._prompt_text,
            service_tier=None,
            kv_transfer_params=None,
        )

    def encode_event(self, outputs: Sequence[RequestOutput], choice: ChatChoice, *, first: bool = False) -> bytes:
        """An event with what is new of a choice. The `first` one of each choice also has the prompt's ids and text."""
        usage: Usage | msgspec.UnsetType | None = None if self._options.include_usage else msgspec.UNSET
        if self._options.counts_always:
            usage = self._usage(outputs)
        fields: dict[str, Any] = {"prompt_text": self._prompt_text} if first and self._prompt_text is not None else {}
        prompt_ids = self._prompt_ids(outputs[0]) if first else msgspec.UNSET
        return make_event(self._encode("chat.completion.chunk", [choice], usage, prompt_ids, **fields))

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

    __slots__ = ("content_frame", "parser", "reasoning_frame")

    def __init__(self, parser: AnswerParser | None) -> None:
        """`parser`: None if all text is content."""
        super().__init__()
        self.parser = parser
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
        self._echo = body.echoed_text
        self._format = answer_format
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
            if self._format.is_plain:
                message = AssistantMessage(role=self._role, content=self._echo + delta.text)
            else:
                parser = self._format.make_parser()
                message = self._parsed_message(parser, delta)
                reason = self._finish_reason(delta, parser)
            whole = self._make_choice(choice.index, delta, message=message)
            choices.append(self._end_choice(whole, delta, reason))
        return self._envelope.encode_whole(output, choices)

    def write_chunks(self, generation: Generation) -> Events:
        """The events of a stream: for each choice its role, then pieces of its content, then its finish reason."""
        parsed = not self._format.is_plain
        sent = [StreamedChoice(self._format.make_parser() if parsed else None) for _ in range(self._num_choices)]
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
                    if text and streamed.parser is None and streamed.content_frame is not None:
                        body += _encode_json(text).join(streamed.content_frame)  # without the call below
                    elif text:
                        body += self._write_text(outputs, choice.index, streamed, text)
                    continue
                delta = streamed.take_delta(choice, tokens_matter=self._tokens_matter)
                if delta is None:
                    continue
                parts = (
                    self._split_delta(choice.index, delta)
                    if streamed.parser is None
                    else self._split_parsed(choice.index, delta, streamed.parser)
                )
                body += b"".join([encode_event(outputs, part) for part in parts])
        yield self._envelope.encode_ending(outputs)

    def _write_text(self, outputs: Sequence[RequestOutput], index: int, choice: StreamedChoice, text: str) -> bytes:
        """An event with what a piece of text adds; empty if the parser holds it back."""
        parser = choice.parser
        if parser is not None:
            answer = parser.add_text(text)
            text = answer.content
            if answer.calls or (answer.reasoning and text):
                delta = self._chat_delta(answer, parser)
                if delta is None:
                    return b""
                return self._envelope.encode_event(outputs, ChatChoice(index=index, delta=delta, token_ids=None))
            if answer.reasoning:
                return self._write_reasoning(outputs, index, choice, answer.reasoning)
            if not text:
                return b""
        if choice.content_frame is None:
            choice.content_frame = self._make_frame(outputs, index, ChatDelta(content=_MARK))
        return _encode_json(text).join(choice.content_frame)

    def _write_reasoning(
        self, outputs: Sequence[RequestOutput], index: int, choice: StreamedChoice, text: str
    ) -> bytes:
        """An event that has nothing but reasoning."""
        if not self._with_reasoning:
            return b""
        if choice.reasoning_frame is None:
            delta = ChatDelta(reasoning=_MARK, reasoning_content=_MARK)
            choice.reasoning_frame = self._make_frame(outputs, index, delta)
        return _encode_json(text).join(choice.reasoning_frame)

    def _make_frame(self, outputs: Sequence[RequestOutput], index: int, delta: ChatDelta) -> list[bytes]:
        """What surrounds the texts of an event that has `delta`, in which each text is `_MARK`."""
        event = self._envelope.encode_event(outputs, ChatChoice(index=index, delta=delta, token_ids=None))
        return event.split(b'"' + _MARK.encode() + b'"')

    def _split_delta(self, index: int, delta: Delta) -> list[ChatChoice]:
        """A chunk with the new content, and with the finish reason, if the choice ended."""
        parts = [self._make_choice(index, delta, delta=ChatDelta(content=delta.text))]
        return parts if delta.finish_reason is None else self._with_end(parts, delta, delta.finish_reason)

    def _split_parsed(self, index: int, delta: Delta, parser: AnswerParser) -> list[ChatChoice]:
        """As `_split_delta`, of an answer that is parsed."""
        parts = []
        answers = [parser.add_text(delta.text)]
        if delta.finish_reason is not None:
            answers.append(parser.end_text(cut=delta.finish_reason != "stop"))
        tokens_unsent = self._tokens_matter and bool(delta.token_ids)
        for answer in answers:
            chunk = self._chat_delta(answer, parser)
            if chunk is not None or tokens_unsent:
                chunk = chunk or ChatDelta(content="")
                parts.append(
                    self._make_choice(index, delta, delta=chunk)
                    if tokens_unsent
                    else self._without_tokens(index, chunk)
                )
                tokens_unsent = False
        if delta.finish_reason is None:
            return parts
        parts = parts or [self._without_tokens(index, ChatDelta())]
        return self._with_end(parts, delta, self._finish_reason(delta, parser))

    def _finish_reason(self, delta: Delta, parser: AnswerParser) -> str | None:
        """An answer that ends by itself and has a call ends because of it, unless the request named the function."""
        use = self._format.tool_use
        is_free = use is not None and not use.is_named
        return "tool_calls" if is_free and delta.finish_reason == "stop" and parser.has_calls else delta.finish_reason

    def _chat_delta(self, answer: AnswerDelta, parser: AnswerParser) -> ChatDelta | None:
        """What a chunk adds; None: nothing."""
        reasoning = answer.reasoning if self._with_reasoning else ""
        if not (answer.content or reasoning or answer.calls):
            return None
        return ChatDelta(
            content=answer.content or None,
            reasoning=reasoning or None,
            reasoning_content=reasoning or None,
            tool_calls=[_call_delta(call, parser) for call in answer.calls] or None,
        )

    def _parsed_message(self, parser: AnswerParser, delta: Delta) -> AssistantMessage:
        """The message of a whole answer that is parsed."""
        answers = [parser.add_text(delta.text), parser.end_text(cut=delta.finish_reason != "stop")]
        content = "".join(answer.content for answer in answers)
        reasoning = "".join(answer.reasoning for answer in answers)
        whole: list[CallDelta] = []
        for call in (call for answer in answers for call in answer.calls):
            if call.name is not None:
                whole.append(call)
            else:
                whole[call.index].arguments += call.arguments
        calls = [_tool_call(call, parser) for call in whole]
        shown, use = reasoning or None, self._format.tool_use
        has_reasoning = self._format.reasoning is not None and self._with_reasoning
        has_content = bool(self._echo or content or not (calls or reasoning) or (use is not None and use.required))
        return AssistantMessage(
            role=self._role,
            content=self._echo + content if has_content else None,
            reasoning=shown if has_reasoning else None,
            reasoning_content=shown if has_reasoning else msgspec.UNSET,
            tool_calls=calls or msgspec.UNSET,
        )

    def _without_tokens(self, index: int, delta: ChatDelta) -> ChatChoice:
        """A part of a chunk whose tokens another part has."""
        return ChatChoice(index=index, delta=delta, token_ids=[] if self._with_ids else None)

    def _make_choice(self, index: int, new: Delta, **fields: Any) -> ChatChoice:
        """A choice with the new tokens and these other fields."""
        scores = new.logprobs if self._with_logprobs else None
        return ChatChoice(
            index=index,
            logprobs=None if scores is None else chat_logprobs(self._pieces, new.token_ids, scores),
            token_ids=new.token_ids if self._with_ids else None,
            logits_digests=new.digests if self._with_digests and new.digests is not None else msgspec.UNSET,
            **fields,
        )

    def _with_end(self, parts: list[ChatChoice], delta: Delta, reason: str | None) -> list[ChatChoice]:
        """The last chunks of a choice: the finish reason is in the last of them that has content, as in vLLM."""
        *before, last = parts
        return [*before, self._end_choice(last, delta, reason)]

    def _end_choice(self, last: ChatChoice, delta: Delta, reason: str | None) -> ChatChoice:
        receipt = (self._with_receipt and delta.receipt) or msgspec.UNSET
        return msgspec.structs.replace(last, finish_reason=reason, stop_reason=delta.stop_reason, receipt=receipt)


def _call_delta(call: CallDelta, parser: AnswerParser) -> ToolCall:
    return msgspec.structs.replace(_tool_call(call, parser), index=call.index)


def _tool_call(call: CallDelta, parser: AnswerParser) -> ToolCall:
    """A call, or what is new in it, without its number."""
    fields: dict[str, Any] = {}
    if call.name is not None:
        fields = {"id": parser.new_call_id(), "type": "custom" if call.is_custom else "function"}
    name = msgspec.UNSET if call.name is None else call.name
    if call.is_custom:
        return ToolCall(**fields, custom=CustomCall(name=name, input=call.arguments))
    return ToolCall(**fields, function=FunctionCall(name=name, arguments=call.arguments))
