"""The input of a response: messages, calls, their outputs and reasoning, as the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field

from shardline.server.errors import bad_request
from shardline.server.openai.messages import MAX_MESSAGES, ChatMessage
from shardline.server.openai.protocol import refuse_if
from shardline.server.openai.request_model import RequestModel

T = TypeVar("T")

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_ROLES = ("user", "assistant", "system", "developer")


class InputPart(RequestModel):
    """A part of an item's content. Only text and refusals are supported; other types are refused."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None
    prompt_cache_breakpoint: Any = None
    image_url: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    detail: Any = None
    input_audio: Any = None


Parts = Annotated[list[InputPart], Field(fail_fast=True)]


class InputItem(RequestModel):
    """An item of the input. It may have all fields of an output item, so that clients can send those back."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    # messages
    role: str | None = None
    content: str | Parts | None = None
    phase: str | None = None
    # calls and their outputs
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    namespace: str | None = None
    caller: Any = None
    parsed_arguments: Any = None
    # reasoning
    summary: Annotated[list[InputPart], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = None


Items = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class _Conversation:
    """Collects the items of one answer of the assistant, which are one message of a chat."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._reasoning: str | None = None
        self._content: str | None = None
        self._calls: list[dict[str, Any]] = []

    def add_message(self, role: str, text: str) -> None:
        """Add a message of any role."""
        if role != "assistant":
            self.end_answer()
            self.messages.append(ChatMessage.model_construct(role=role, content=text))
            return
        if self._content is not None or self._calls:
            self.end_answer()
        self._content = text

    def add_reasoning(self, text: str) -> None:
        """Add the assistant's reasoning, which comes before its content and calls."""
        if self._content is not None or self._calls:
            self.end_answer()
        self._reasoning = (self._reasoning or "") + text

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call of the assistant."""
        function = {"name": name, "arguments": arguments}
        self._calls.append({"id": call_id, "type": "function", "function": function})

    def add_output(self, call_id: str, text: str) -> None:
        """Add the output of a call."""
        self.end_answer()
        self.messages.append(ChatMessage.model_construct(role="tool", content=text, tool_call_id=call_id))

    def end_answer(self) -> None:
        """Add what the assistant has said and called as a message."""
        if self._content is not None or self._calls:
            content = self._content if self._content is not None else ""
            message = ChatMessage.model_construct(role="assistant", content=content)
            fields = {"tool_calls": self._calls or None, "reasoning": self._reasoning or None}
            self.messages.append(message.model_copy(update={k: v for k, v in fields.items() if v is not None}))
        self._reasoning, self._content, self._calls = None, None, []


def to_messages(instructions: str | None, turns: Sequence[Sequence[InputItem]]) -> list[ChatMessage]:
    """The messages of a conversation; the last of `turns` is the input of this request.

    Raises:
        ApiError: 400, an item of the last turn lacks a field, or has a type that is not supported.
    """
    conversation = _Conversation()
    if instructions:
        conversation.add_message("system", instructions)
    for turn in turns:
        for index, item in enumerate(turn):
            _add_item(conversation, item, f"input[{index}]")
    conversation.end_answer()
    return conversation.messages


def _add_item(conversation: _Conversation, item: InputItem, place: str) -> None:
    if item.type == "message" or (item.type is None and item.role is not None):
        if item.role not in _ROLES:
            raise bad_request(f"Invalid value for '{place}.role': use {', '.join(_ROLES)}.", f"{place}.role")
        conversation.add_message(item.role, _text(item.content, f"{place}.content"))
    elif item.type == "function_call":
        name = _require(item.name, f"{place}.name")
        arguments = _require(item.arguments, f"{place}.arguments")
        conversation.add_call(_require(item.call_id, f"{place}.call_id"), name, arguments)
    elif item.type == "function_call_output":
        text = _text(item.output, f"{place}.output")
        conversation.add_output(_require(item.call_id, f"{place}.call_id"), text)
    elif item.type == "reasoning":
        conversation.add_reasoning(_text(item.content or item.summary or "", f"{place}.content"))
    else:
        refuse_if(
            True,
            f"{place}.type",
            f"'{place}' has the type '{item.type}'; supported are 'message', 'function_call', 'function_call_output' "
            "and 'reasoning'.",
        )


def _require(value: T | None, name: str) -> T:
    if value is None:
        raise bad_request(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    return value


def _text(given: str | list[InputPart] | None, name: str) -> str:
    """The text of a content; its parts are joined."""
    if given is None or isinstance(given, str):
        return _require(given, name)
    texts = []
    for part in given:
        text = part.text if part.type in _TEXT_PARTS else part.refusal if part.type == "refusal" else None
        message = f"'{name}' has a part of the type '{part.type}'; this model takes text only."
        refuse_if(text is None, name, message)
        texts.append(text or "")
    return "".join(texts)
