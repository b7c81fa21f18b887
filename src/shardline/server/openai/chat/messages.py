"""The messages of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field

from shardline.server.errors import bad_request, missing_parameter
from shardline.server.json_body import RequestModel
from shardline.server.openai.chat.custom_tools import as_function_calls

MAX_MESSAGES = 4096
MAX_ROLE_CHARS = 64
MAX_PARTS = 4096
"""The most parts of one message."""


class ContentPart(RequestModel):
    """A part of a message. Only text and `prompt_embeds` are taken; other types are refused, unknown fields ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: str
    text: str | None = None
    data: str | None = None
    """Of `prompt_embeds`: the base64 of a tensor, see CompletionRequest."""
    refusal: str | None = None
    cache_control: dict[str, Any] | None = None
    """Accepted, but has no effect: prefixes are cached anyway."""
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class ChatMessage(RequestModel):
    """A message of the conversation. It may have all fields of an answer, so that clients can send answers back.

    Other fields and other roles are the chat template's matter, as in vLLM.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    role: Annotated[str, Field(max_length=MAX_ROLE_CHARS)]
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True), AfterValidator(as_function_calls)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it. They do not know the role "developer", so it becomes "system"."""
        message = self.model_dump(exclude_none=True)
        if not self.tool_calls:
            message.setdefault("content", "")  # an answer may only reason, and templates join texts
        if self.role == "developer":
            message["role"] = "system"
        if isinstance(self.content, list):
            message["content"] = [{"type": "text", "text": part.text or part.refusal} for part in self.content]
        if self.reasoning is not None:
            # Templates know only this name.
            message.setdefault("reasoning_content", self.reasoning)
        return message


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Refuse messages that lack what the API asks for.

    Raises:
        ApiError: 400.
    """
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise missing_parameter(f"messages[{index}].content")
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type == "prompt_embeds":
                if part.data is None:
                    name = f"messages[{index}].content"
                    raise bad_request(f"A part 'prompt_embeds' of '{name}' needs 'data': the base64 of a tensor.", name)
                continue
            if part.type not in ("text", "refusal"):
                raise bad_request(
                    f"messages[{index}] has a content part of type '{part.type}'; this model takes text only.",
                    "messages",
                )
            if part.text is None and part.refusal is None:
                raise missing_parameter(f"messages[{index}].content[{place}].text")
        for call in message.tool_calls or ():
            function = call.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                name = f"messages[{index}].tool_calls"
                raise bad_request(f"Invalid value for '{name}': every call needs a 'function' with a 'name'.", name)
