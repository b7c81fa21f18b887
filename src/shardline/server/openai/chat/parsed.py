"""Chat answers with reasoning or tool calls: what their text is in messages and chunks."""

from __future__ import annotations

from typing import Any

import msgspec

from shardline.api.outputs import CompletionOutput
from shardline.server.openai.answer_format import AnswerFormat
from shardline.server.openai.chat.shapes import AssistantMessage, ChatDelta, CustomCall, FunctionCall, ToolCall
from shardline.text.tool_parsers.base import AnswerDelta, CallDelta


class ParsedChoice:
    """One choice whose text is parsed."""

    def __init__(self, answer_format: AnswerFormat, *, with_reasoning: bool) -> None:
        """`with_reasoning`: whether the client sees the reasoning."""
        self._parser = answer_format.make_parser()
        self._use = answer_format.tool_use
        self._with_reasoning = with_reasoning
        self._shows_reasoning = with_reasoning and answer_format.reasoning is not None

    def add_text(self, text: str) -> ChatDelta | None:
        """What a piece of text adds; None: nothing, or the parser holds it back."""
        return self._chat_delta(self._parser.add_text(text))

    def split(self, delta: CompletionOutput, *, has_tokens: bool) -> list[ChatDelta]:
        """What a delta adds, and its end. `has_tokens`: the first part is there in any case, for its tokens."""
        parts = [self._chat_delta(answer) for answer in self._parser.read(delta.text, delta.finish_reason)]
        if has_tokens and parts[0] is None:
            parts[0] = ChatDelta(content="")
        return [part for part in parts if part is not None]

    def finish_reason(self, delta: CompletionOutput) -> str | None:
        """An answer that ends by itself and has a call ends because of it, unless the request named the function."""
        is_free = self._use is not None and not self._use.is_named
        has_calls = is_free and delta.finish_reason == "stop" and self._parser.has_calls
        return "tool_calls" if has_calls else delta.finish_reason

    def read_whole(self, delta: CompletionOutput, role: str, echo: str) -> AssistantMessage:
        """The message of a whole answer, whose content begins with `echo`."""
        answers = self._parser.read(delta.text, delta.finish_reason)
        content = "".join(answer.content for answer in answers)
        reasoning = "".join(answer.reasoning for answer in answers)
        whole: list[CallDelta] = []
        for call in (call for answer in answers for call in answer.calls):
            if call.name is not None:
                whole.append(call)
            else:
                whole[call.index].arguments += call.arguments
        calls = [self._tool_call(call) for call in whole]
        shown, use = reasoning or None, self._use
        has_content = bool(echo or content or not (calls or reasoning) or (use is not None and use.required))
        return AssistantMessage(
            role=role,
            content=echo + content if has_content else None,
            reasoning=shown if self._shows_reasoning else None,
            reasoning_content=shown if self._shows_reasoning else msgspec.UNSET,
            tool_calls=calls or msgspec.UNSET,
        )

    def _chat_delta(self, answer: AnswerDelta) -> ChatDelta | None:
        """What a chunk adds; None: nothing."""
        reasoning = answer.reasoning if self._with_reasoning else ""
        if not (answer.content or reasoning or answer.calls):
            return None
        return ChatDelta(
            content=answer.content or None,
            reasoning=reasoning or None,
            reasoning_content=reasoning or None,
            tool_calls=[msgspec.structs.replace(self._tool_call(call), index=call.index) for call in answer.calls]
            or None,
        )

    def _tool_call(self, call: CallDelta) -> ToolCall:
        """A call, or what is new in it, without its number."""
        fields: dict[str, Any] = {}
        if call.name is not None:
            fields = {"id": self._parser.new_call_id(), "type": "custom" if call.is_custom else "function"}
        name = msgspec.UNSET if call.name is None else call.name
        if call.is_custom:
            return ToolCall(**fields, custom=CustomCall(name=name, input=call.arguments))
        return ToolCall(**fields, function=FunctionCall(name=name, arguments=call.arguments))
