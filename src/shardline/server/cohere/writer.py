"""Writes Cohere's chat answers, as a whole or in events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from pydantic import BaseModel

from shardline.api.outputs import RequestOutput
from shardline.server.openai.answer_parts import TokenPieces, chat_logprobs
from shardline.server.openai.block_writer import BlockWriter
from shardline.server.sse import Events, make_event
from shardline.text.tokenizer import Tokenizer


class Tokens(msgspec.Struct, frozen=True):
    """Number of tokens of the prompt and of the answer."""

    input_tokens: int
    output_tokens: int


class ChatUsage(msgspec.Struct, frozen=True):
    """What the answer took; `cached_tokens`: how many of the prompt came from the prefix cache."""

    billed_units: Tokens
    tokens: Tokens
    cached_tokens: int


class ContentBlock(msgspec.Struct, kw_only=True):
    """A block of the answer: text or thinking."""

    type: str
    text: str | msgspec.UnsetType = msgspec.UNSET
    thinking: str | msgspec.UnsetType = msgspec.UNSET


class CalledFunction(msgspec.Struct):
    """The called function; `arguments` is JSON text."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """A tool call."""

    id: str
    function: CalledFunction
    type: str = "function"


class CohereMessage(msgspec.Struct, omit_defaults=True):
    """The message of the answer."""

    role: str
    content: list[ContentBlock] = []
    tool_calls: list[ToolCall] = []


class TokenLogprob(msgspec.Struct, frozen=True):
    """The log probability of one token of the answer."""

    text: str
    token_ids: list[int]
    logprobs: list[float]


class CohereChatResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The answer."""

    id: str
    finish_reason: str
    message: CohereMessage
    usage: ChatUsage
    logprobs: list[TokenLogprob] | msgspec.UnsetType = msgspec.UNSET


class CohereError(BaseModel):
    """The answer to a request that failed."""

    message: str


@dataclass
class CohereWriter(BlockWriter):
    """Writes the answer to one request."""

    response_id: str
    tokenizer: Tokenizer | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._message = CohereMessage("assistant")
        self._open = ""
        """The kind of the last block or call, while it is open."""

    def write_whole(self, output: RequestOutput) -> bytes:
        """The JSON of the whole answer."""
        self._add_output(output)
        choice = output.outputs[0]
        logprobs: list[TokenLogprob] | msgspec.UnsetType = msgspec.UNSET
        if choice.token_logprobs is not None:
            scores = chat_logprobs(TokenPieces(self.tokenizer), choice.token_ids, choice.token_logprobs).content
            pairs = zip(choice.token_ids, scores, strict=True)
            logprobs = [TokenLogprob(score.token, [token_id], [score.logprob]) for token_id, score in pairs]
        return msgspec.json.encode(
            CohereChatResponse(
                id=self.response_id,
                finish_reason=self._finish_reason(output),
                message=self._message,
                usage=_usage_of(output),
                logprobs=logprobs,
            )
        )

    def write_events(self, output: RequestOutput) -> Events:
        """The events of a stream, in Cohere's order; `output`: that of the request, which has not begun."""
        self._event("message-start", id=self.response_id, delta={"message": {"role": "assistant"}})
        while (update := (yield self._take_events())) is not None:
            self._add_output(update[1])
        delta = {"finish_reason": self._finish_reason(output), "usage": _usage_of(output)}
        self._event("message-end", id=self.response_id, delta=delta)
        yield self._take_events()

    def _event(self, kind: str, **fields: Any) -> None:
        self._events.append(make_event(msgspec.json.encode({"type": kind, **fields})))

    def _add_content(self, kind: Literal["thinking", "text"], text: str) -> None:
        blocks = self._message.content
        if self._open != kind:
            self._end_block()
            blocks.append(ContentBlock(type=kind, **{kind: ""}))
            self._open = kind
            self._event("content-start", index=len(blocks) - 1, delta={"message": {"content": blocks[-1]}})
        setattr(blocks[-1], kind, getattr(blocks[-1], kind) + text)
        self._event("content-delta", index=len(blocks) - 1, delta={"message": {"content": {kind: text}}})

    def _begin_call(self, name: str) -> None:
        calls = self._message.tool_calls
        calls.append(ToolCall(self._parser.new_call_id(), CalledFunction(name)))
        self._open = "call"
        self._event("tool-call-start", index=len(calls) - 1, delta={"message": {"tool_calls": calls[-1]}})

    def _add_arguments(self, text: str) -> None:
        calls = self._message.tool_calls
        calls[-1].function.arguments += text
        new = {"tool_calls": {"function": {"arguments": text}}}
        self._event("tool-call-delta", index=len(calls) - 1, delta={"message": new})

    def _end_block(self) -> None:
        if self._open == "call":
            self._event("tool-call-end", index=len(self._message.tool_calls) - 1)
        elif self._open:
            self._event("content-end", index=len(self._message.content) - 1)
        self._open = ""

    def _finish_reason(self, output: RequestOutput) -> str:
        choice = output.outputs[0]
        if choice.finish_reason == "length":
            return "MAX_TOKENS"
        if self._parser.has_calls:
            return "TOOL_CALL"
        return "STOP_SEQUENCE" if isinstance(choice.stop_reason, str) else "COMPLETE"


def _usage_of(output: RequestOutput) -> ChatUsage:
    tokens = Tokens(len(output.prompt_token_ids), len(output.outputs[0].token_ids))
    return ChatUsage(tokens, tokens, output.num_cached_tokens)
