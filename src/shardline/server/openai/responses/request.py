"""Requests of POST /v1/responses: their fields, and their input items as chat messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from shardline.server.errors import bad_request, require_value
from shardline.server.json_body import RequestModel
from shardline.server.openai.answer_form import ResponseFormat
from shardline.server.openai.chat.conversation import ConversationFields, read_effort
from shardline.server.openai.chat.custom_tools import as_function
from shardline.server.openai.chat.messages import MAX_MESSAGES, ChatMessage
from shardline.server.openai.chat.tools import MAX_TOOLS, Tool
from shardline.server.openai.ignored_fields import check_metadata
from shardline.server.openai.protocol import CHAT_AND_COMPLETION_FIELDS, SamplingFields, refuse_if
from shardline.text.custom_input import write_input

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_ROLES = ("user", "assistant", "system", "developer")
LOGPROBS = "message.output_text.logprobs"
_UNUSED_TOOL_FIELDS = frozenset({"type", "output_schema", "allowed_callers", "defer_loading", "async"})
_PARTIAL = ("in_progress", "incomplete")
"""The statuses of a message that the answer continues."""


def flat_name(namespace: str | None, name: str) -> str:
    """The name by which the model calls a function of a namespace, as in vLLM."""
    return name if namespace is None else f"{namespace}__{name}"


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
    """An item of the input. It may have all fields of an output item, so that clients can send those back.

    Other fields are ignored, as in vLLM: clients add some of their own.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

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
    input: str | None = None
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
        name = flat_name(item.namespace, require_value(item.name, f"{place}.name"))
        arguments = require_value(item.arguments, f"{place}.arguments")
        conversation.add_call(require_value(item.call_id, f"{place}.call_id"), name, arguments)
    elif item.type == "custom_tool_call":
        name = flat_name(item.namespace, require_value(item.name, f"{place}.name"))
        arguments = write_input(require_value(item.input, f"{place}.input"))
        conversation.add_call(require_value(item.call_id, f"{place}.call_id"), name, arguments)
    elif item.type in ("function_call_output", "custom_tool_call_output"):
        text = _text(item.output, f"{place}.output")
        conversation.add_output(require_value(item.call_id, f"{place}.call_id"), text)
    elif item.type == "reasoning":
        conversation.add_reasoning(_text(item.content or item.summary or "", f"{place}.content"))
    else:
        refuse_if(
            True,
            f"{place}.type",
            f"'{place}' has the type '{item.type}'; supported are 'message', 'function_call', 'custom_tool_call', the "
            "outputs of both, and 'reasoning'.",
        )


def _text(given: str | list[InputPart] | None, name: str) -> str:
    """The text of a content; its parts are joined."""
    if given is None or isinstance(given, str):
        return require_value(given, name)
    texts = []
    for index, part in enumerate(given):
        kind = "refusal" if part.type == "refusal" else "text"
        message = f"'{name}' has a part of the type '{part.type}'; this model takes text only."
        refuse_if(part.type not in (*_TEXT_PARTS, "refusal"), name, message)
        texts.append(require_value(part.refusal if kind == "refusal" else part.text, f"{name}[{index}].{kind}"))
    return "".join(texts)


class TextFormat(RequestModel):
    """The required form of the text."""

    type: str
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(RequestModel):
    """What the text must be like. `verbosity` is accepted, but has no effect."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(SamplingFields):
    """The body of POST /v1/responses."""

    taken_here: ClassVar[frozenset[str]] = frozenset({"store", "metadata", "thinking_token_budget"})

    input: str | Items
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    """Whether the server keeps the response; None: it does."""
    metadata: Annotated[dict[str, str] | None, BeforeValidator(check_metadata)] = None
    text: TextConfig | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    """Accepted, but has no effect: only built-in tools count."""
    top_logprobs: Annotated[int, Field(ge=-1)] | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    include_reasoning: bool | None = None
    """Whether the response shows the model's reasoning; None: it does."""
    reasoning: dict[str, Any] | None = None
    """`effort` reaches the chat template; the response repeats all of it."""
    enable_response_messages: bool | None = None
    """Whether the response has the prompt and the answer as the model has them."""
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """auto: the beginning of a prompt that is too long is cut off."""
    background: bool | None = None
    conversation: Any = None
    context_management: Any = None
    moderation: Any = None
    access_programs: Any = None
    image: Any = None
    prompt: Any = None

    def check(self) -> None:
        """Check the fields together.

        Raises:
            ApiError: 400, the fields contradict each other or ask for something unsupported.
        """
        self.check_supported()
        refuse_if(self.n not in (None, 1), "n", "A response has one answer: leave out 'n'.")
        refuse_if(self.response_format is not None, "response_format", "Use 'text.format' instead.")
        for name in CHAT_AND_COMPLETION_FIELDS:
            refuse_if(
                getattr(self, name) not in (None, False),
                name,
                f"'{name}' is not supported here: use /v1/chat/completions.",
            )
        refuse_if(
            bool(self.background) and self.store is False,
            "background",
            "background can only be used when `store` is true, so that the response can be fetched.",
        )
        refuse_if(
            self.truncation == "auto" and self.truncate_prompt_tokens is not None,
            "truncation",
            "'truncation' and 'truncate_prompt_tokens' exclude each other: set one of them.",
        )
        refuse_if(
            not self._can_go_on and self.resume is not None and bool(self.resume.prompts),
            "resume",
            "'resume' goes on with no response that is made in the background or has log probabilities.",
        )
        for name in ("conversation", "context_management", "moderation", "access_programs", "image", "prompt"):
            refuse_if(getattr(self, name) is not None, name, f"'{name}' is not supported: leave it out.")

    @property
    def conversation_fields(self) -> ConversationFields:
        """The fields that control how messages become a prompt.

        Raises:
            ApiError: 400, a tool is not a function.
        """
        tools = self._functions
        choice = self.tool_choice
        if isinstance(choice, dict):
            choice = self._as_chat_choice(choice)
        continues = self._continues_answer
        return ConversationFields(
            tools=[function.tool for function in tools] or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=read_effort((self.reasoning or {}).get("effort"), "reasoning.effort"),
            continue_final_message=continues or None,
        )

    @property
    def namespaces(self) -> dict[str, tuple[str, str]]:
        """By the name that the model calls, the namespace and the name of each function that is in one."""
        return {f.tool.function.name: (f.namespace, f.name) for f in self._functions if f.namespace is not None}

    @cached_property
    def _functions(self) -> list[_Function]:
        functions = []
        for index, tool in enumerate(self.tools or ()):
            functions += _read_tool(tool, f"tools[{index}]")
            refuse_if(len(functions) > MAX_TOOLS, "tools", f"The tools have more than {MAX_TOOLS} functions.")
        return functions

    def _as_chat_choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A choice of one tool, or of those that are allowed, as chats have it.

        Raises:
            ApiError: 400, its type is not supported.
        """
        kind, tools = choice.get("type"), choice.get("tools")
        if kind == "allowed_tools" and isinstance(tools, list) and len(tools) <= MAX_TOOLS:
            return {"type": kind, kind: {"mode": choice.get("mode"), "tools": list(map(self._as_named_choice, tools))}}
        return self._as_named_choice(choice)

    def _as_named_choice(self, choice: Any) -> dict[str, Any]:
        kind = str(choice.get("type")) if isinstance(choice, dict) else ""
        refuse_if(
            kind not in ("function", "custom"),
            "tool_choice",
            "'tool_choice' may be 'none', 'auto', 'required', {\"type\": \"function\", \"name\": \"…\"}, the same "
            'with "custom", or {"type": "allowed_tools", "mode": "auto", "tools": […]}.',
        )
        return {"type": kind, kind: {"name": self._resolve_choice(choice.get("name"))}}

    def _resolve_choice(self, name: Any) -> Any:
        """The flat name of a function, which may be chosen by its own name if only one namespace has it.

        Raises:
            ApiError: 400, several have it.
        """
        names = [function.tool.function.name for function in self._functions]
        own = [function.tool.function.name for function in self._functions if function.name == name]
        if name in names or not own:
            return name
        refuse_if(
            len(own) > 1,
            "tool_choice",
            f"Tool choice '{name}' is ambiguous: choose one of {', '.join(own)}.",
        )
        return own[0]

    @property
    def _continues_answer(self) -> bool:
        """Whether the input ends within a message of the assistant."""
        last = None if isinstance(self.input, str) else self.input[-1]
        return last is not None and last.role == "assistant" and last.status in _PARTIAL

    @property
    def text_format(self) -> ResponseFormat | None:
        """`text.format` as chats have it."""
        wanted = None if self.text is None else self.text.format
        if wanted is None:
            return None
        return ResponseFormat(type=wanted.type, json_schema={"schema": wanted.schema_})

    @property
    def _can_go_on(self) -> bool:
        """Whether the stream can have marks.

        Responses in the background end here or nowhere, and the last events repeat all log probabilities, which marks
        do not have.
        """
        return not self.background and self.num_logprobs is None

    @property
    def admission(self) -> dict[str, Any]:
        """As in `SamplingFields`."""
        return super().admission if self._can_go_on else self.queueing

    @property
    def num_events_before(self) -> int:
        """Events of the stream that another server has written."""
        return self.resume.num_events if self.resume is not None else 0

    @property
    def num_logprobs(self) -> int | None:
        """The number of most likely tokens to report with each token; None: no log probabilities."""
        wanted = self.top_logprobs is not None or LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None


@dataclass(frozen=True)
class _Function:
    """A function that the model may call, under its flat name."""

    tool: Tool
    namespace: str | None
    name: str
    """Its own name, without the namespace."""


def _read_tool(tool: dict[str, Any], place: str) -> list[_Function]:
    """The function, or those of a namespace."""
    kind = tool.get("type")
    if kind == "namespace":
        name, members = tool.get("name"), tool.get("tools")
        if not isinstance(name, str):
            raise bad_request(f"Missing required parameter: '{place}.name'.", f"{place}.name")
        if not (isinstance(members, list) and all(isinstance(member, dict) for member in members)):
            raise bad_request(f"Invalid value for '{place}.tools': it must be a list of tools.", f"{place}.tools")
        refuse_if(len(members) > MAX_TOOLS, f"{place}.tools", f"A namespace may have {MAX_TOOLS} functions.")
        return [_read_function(member, f"{place}.tools[{i}]", name) for i, member in enumerate(members)]
    return [_read_function(tool, place, None)]


def _read_function(tool: dict[str, Any], place: str, namespace: str | None) -> _Function:
    kind = tool.get("type")
    refuse_if(
        kind not in ("function", "custom"),
        f"{place}.type",
        f"Tools of the type {kind!r} are not supported: offer functions or custom tools.",
    )
    definition = {k: v for k, v in tool.items() if k not in _UNUSED_TOOL_FIELDS}
    try:
        offered = Tool.model_validate(as_function({"type": kind, kind: definition}))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in (place, *first["loc"][1:]))
        raise bad_request(f"Invalid value for '{name}': {first['msg']}.", name, "invalid_value") from error
    except ValueError as error:
        raise bad_request(f"Invalid value for '{place}': {error}.", place, "invalid_value") from error
    function = offered.function
    flat = function.model_copy(update={"name": flat_name(namespace, function.name)})
    return _Function(offered.model_copy(update={"function": flat}), namespace, function.name)
