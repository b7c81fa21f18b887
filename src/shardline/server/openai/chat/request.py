"""Chat requests: the conversation, the tools that it offers, and how they become a prompt."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, cast, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from shardline.api.prompt_embeds import Rows, join_parts
from shardline.messages.request import PromptEmbeds
from shardline.server.errors import bad_request
from shardline.server.json_body import check_template_values
from shardline.server.openai.chat.custom_tools import allowed_tools, as_function, as_function_calls
from shardline.server.openai.protocol import RequestModel, SamplingFields, TokenIds, refuse_if
from shardline.server.service import Service
from shardline.text.chat_messages import text_content
from shardline.text.chat_template import Conversation
from shardline.text.tool_parsers import find_tool_parser
from shardline.text.tool_parsers.base import OfferedFunction, ToolParser

logger = logging.getLogger(__name__)

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_MESSAGES = 4096

MAX_ROLE_CHARS = 64

MAX_PARTS = 4096
"""The most parts of one message."""

_FORCED_FORMAT = "llama3_json"
"""JSON that a grammar enforces: any model can write it."""

_RESERVED = {"messages", "tools", "add_generation_prompt", "chat_template"}
"""Variables of chat templates that have a field of their own."""

_INLINE_MESSAGES = 256
"""The most messages that are converted on the event loop."""


class FunctionDefinition(RequestModel):
    """A function that the model may call; `parameters` is a JSON schema. Unknown fields are ignored, as in vLLM."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool: a function, or one that stands for a custom tool. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal["function", "custom"] = "function"
    function: FunctionDefinition


@dataclass(frozen=True)
class ToolUse:
    """Which functions an answer may call, and how."""

    callable: tuple[FunctionDefinition, ...]
    """The functions that the answer may call."""
    required: bool
    """Whether the answer must call one."""
    parallel: bool
    """Whether it may call more than one."""
    parser: type[ToolParser]
    is_named: bool = False
    """Whether the request names the function to call."""
    custom: frozenset[str] = frozenset()
    """The names of those that stand for custom tools."""

    @cached_property
    def offered(self) -> tuple[OfferedFunction, ...]:
        """The functions that the answer may call, as the parsers of answers take them."""
        return tuple(OfferedFunction(one.name, one.parameters, one.name in self.custom) for one in self.callable)

    def make_parser(self) -> ToolParser:
        """A parser for one answer."""
        return self.parser(self.offered, parallel=self.parallel)


def _choose_tools(
    service: Service, tools: Sequence[Tool], choice: str | dict[str, Any] | None, parallel: bool
) -> ToolUse | None:
    """What `tools` and `tool_choice` mean together. None: the answer may not call tools.

    The chat template may show no tools to the model; the start of the server warns of that. If it is not known how the
    model writes calls, an answer calls functions only if it must.

    Raises:
        ApiError: 400, they do not fit each other or the model.
    """
    functions = tuple(tool.function for tool in tools)
    _check_functions(functions)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed = allowed_tools(choice, lambda one: _named_function(one, functions), MAX_TOOLS)
        names = {one.name for one in allowed}
        functions = tuple(one for one in functions if one.name in names)
    named = _named_function(choice, functions) if isinstance(choice, dict) else None
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise bad_request(
            f"Invalid value for 'tool_choice': '{choice}'; use 'none', 'auto', 'required' or a function.", "tool_choice"
        )
    if not functions:
        refuse_if(
            choice not in (None, "none", "auto"),
            "tool_choice",
            "'tool_choice' needs 'tools': offer a function to call.",
        )
        return None
    if choice == "none":
        return None
    required = choice == "required" or named is not None
    parser = service.chat.tool_parser
    if parser is None:
        _warn_of_unknown_format()
        if not required:
            return None
        parser = find_tool_parser(_FORCED_FORMAT)
    return ToolUse(
        callable=functions if named is None else (named,),
        required=required,
        parallel=parallel and named is None,
        parser=parser,
        is_named=named is not None,
        custom=frozenset(tool.function.name for tool in tools if tool.type == "custom"),
    )


@functools.cache
def _warn_of_unknown_format() -> None:
    logger.warning(
        "a request offers tools, but how this model writes calls is not known, so its answers have none unless a "
        "request forces them; name the format by --tool-call-parser"
    )


def _check_functions(functions: Sequence[FunctionDefinition]) -> None:
    names = set()
    for index, function in enumerate(functions):
        param = f"tools[{index}].function.name"
        if not _NAME.fullmatch(function.name):
            raise bad_request(
                f"Invalid value for '{param}': a name has 1 to 64 letters, digits, underscores, dots or dashes.", param
            )
        if function.name in names:
            raise bad_request(f"Invalid value for '{param}': there are two functions '{function.name}'.", param)
        names.add(function.name)


def _named_function(choice: Any, functions: Sequence[FunctionDefinition]) -> FunctionDefinition:
    """The function, or custom tool, that an object names."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    definition = choice.get(kind) if kind in ("function", "custom") else None
    name = definition.get("name") if isinstance(definition, dict) else None
    if not isinstance(name, str):
        raise bad_request(
            "Invalid value for 'tool_choice': a function is chosen by "
            '{"type": "function", "function": {"name": "…"}}, and a custom tool by the same with "custom".',
            "tool_choice",
        )
    for function in functions:
        if function.name == name:
            return function
    raise bad_request(f"Invalid value for 'tool_choice': 'tools' has no function '{name}'.", "tool_choice")


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
        if self.role == "developer":
            message["role"] = "system"
        if isinstance(self.content, list):
            message["content"] = [{"type": "text", "text": part.text or part.refusal} for part in self.content]
        if self.reasoning is not None:
            # Templates know only this name.
            message.setdefault("reasoning_content", self.reasoning)
        return message


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as a prompt."""

    text: str
    token_ids: list[int]
    tool_use: ToolUse | None
    """None: the answer may not call tools."""
    embeds: PromptEmbeds | None = None
    """Rows in place of some tokens; None: there are none."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def read_effort(value: Any, param: str) -> Effort | None:
    """An effort of reasoning, or None.

    Raises:
        ApiError: 400, it is none of those that there are.
    """
    for effort in get_args(Effort):
        if value == effort:
            return cast("Effort", effort)
    if value is not None:
        raise bad_request(f"Invalid value for '{param}': use {', '.join(get_args(Effort))}.", param)
    return None


class ConversationFields(RequestModel):
    """The fields that control how messages become a prompt."""

    chat_template: str | None = None
    """A template of this request's own, in jinja; it needs --trust-request-chat-template."""
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    """For chat templates that know it; "none" asks them not to think."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: (
        Annotated[list[Annotated[Tool, BeforeValidator(as_function)]], Field(max_length=MAX_TOOLS, fail_fast=True)]
        | None
    ) = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template that the request sets."""
        effort = self.reasoning_effort
        thinks = effort != "none"
        asked = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
        return {**asked, **(self.chat_template_kwargs or {})}

    def choose_tools(self, service: Service) -> ToolUse | None:
        """What the answer may call.

        Raises:
            ApiError: 400, `tools` and `tool_choice` do not fit each other.
        """
        return _choose_tools(service, self.tools or (), self.tool_choice, self.parallel_tool_calls is not False)

    async def encode_messages(
        self,
        service: Service,
        messages: Sequence[ChatMessage],
        add_special_tokens: bool,
        *,
        max_tokens: int | None = None,
        param: str = "messages",
    ) -> EncodedChat:
        """The prompt of `messages`.

        `max_tokens`: longer prompts are refused before they are encoded; None: those longer than the model's length.
        `param`: the field of the request that had the messages.

        Raises:
            ApiError: 400, a field is not supported, or the model's template refuses the messages.
        """
        self._check_options(messages)
        refuse_if(
            self.chat_template is not None and not service.config.trust_request_chat_template,
            "chat_template",
            "A request may bring a chat template only if the server is started with --trust-request-chat-template.",
        )
        _check_messages(messages)
        for name, field in self._template_fields(messages, param):
            check_template_values(name, field)
        messages, rows = await _take_embeds(service, messages, param)
        tool_use = self.choose_tools(service)
        offered = [] if self.tool_choice == "none" else self.tools or []
        chat = Conversation(
            await _for_template(messages),
            [{**tool.model_dump(exclude_none=True), "type": "function"} for tool in offered] or None,
            {**service.config.template_variables, **self.template_variables},
            self.add_generation_prompt is not False,
            bool(self.continue_final_message),
            add_special_tokens,
            self.chat_template,
            tuple(rows),
        )
        limit = service.llm.model.max_model_len if max_tokens is None else max_tokens
        text, ids = await service.encode_chat(chat, max_tokens=limit, param=param)
        if not rows:
            return EncodedChat(text, ids, tool_use)
        filled, embeds = join_parts([list(rows.values())[-1 - one] if one < 0 else [one] for one in ids])
        return EncodedChat(text, filled, tool_use, embeds)

    def _template_fields(self, messages: Sequence[ChatMessage], param: str) -> list[tuple[str, list[Any]]]:
        """What chat templates may write as JSON, and the names of the fields. `param`: that of `messages`."""
        objects = [(m.tool_calls, m.function_call, m.annotations, m.audio, m.model_extra or None) for m in messages]
        return [
            (param, [value for values in objects for value in values if value is not None]),
            ("tools", [tool.function.parameters or {} for tool in self.tools or ()]),
            ("documents", [self.template_variables.get("documents") or []]),
            ("chat_template_kwargs", [self.chat_template_kwargs or {}]),
        ]

    def _check_options(self, messages: Sequence[ChatMessage]) -> None:
        refuse_if(
            bool(self.continue_final_message) and self.add_generation_prompt is True,
            "continue_final_message",
            "'continue_final_message' and 'add_generation_prompt' exclude each other: set one of them.",
        )
        refuse_if(
            bool(self.continue_final_message) and messages[-1].role != "assistant",
            "continue_final_message",
            "'continue_final_message' needs a last message of the role 'assistant'.",
        )
        reserved = _RESERVED & (self.chat_template_kwargs or {}).keys()
        if reserved:
            raise bad_request(
                f"'chat_template_kwargs' must not set '{sorted(reserved)[0]}'; there is a field of that name.",
                "chat_template_kwargs",
            )


async def _take_embeds(
    service: Service, messages: Sequence[ChatMessage], param: str
) -> tuple[Sequence[ChatMessage], dict[str, Rows]]:
    """The messages with a text that nobody can guess in place of each `prompt_embeds`, and the rows of each text."""
    rows: dict[str, Rows] = {}

    async def take(part: ContentPart) -> ContentPart:
        if part.type != "prompt_embeds":
            return part
        assert part.data is not None
        gap = secrets.token_hex(16)
        rows[gap] = await service.read_embeds(part.data, param)
        return ContentPart(type="text", text=gap)

    taken = []
    for message in messages:
        if isinstance(message.content, list) and any(part.type == "prompt_embeds" for part in message.content):
            message = message.model_copy(update={"content": [await take(part) for part in message.content]})
        taken.append(message)
    return taken, rows


async def _for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates expect them; many are converted on a thread."""
    if len(messages) <= _INLINE_MESSAGES:
        return [message.for_template() for message in messages]
    return await asyncio.to_thread(list, map(ChatMessage.for_template, messages))


def _check_messages(messages: Sequence[ChatMessage]) -> None:
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            name = f"messages[{index}].content"
            raise bad_request(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
        for part in message.content if isinstance(message.content, list) else ():
            if part.type == "prompt_embeds":
                if part.data is None:
                    name = f"messages[{index}].content"
                    raise bad_request(f"A part 'prompt_embeds' of '{name}' needs 'data': the base64 of a tensor.", name)
                continue
            if part.type not in ("text", "refusal") or (part.text is None and part.refusal is None):
                raise bad_request(
                    f"messages[{index}] has a content part of type '{part.type}'; this model takes text only.",
                    "messages",
                )
        for call in message.tool_calls or ():
            function = call.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                name = f"messages[{index}].tool_calls"
                raise bad_request(f"Invalid value for '{name}': every call needs a 'function' with a 'name'.", name)


class TransferParams(RequestModel):
    """What another server hands over with a request. Its other fields are ignored: no KV blocks are moved."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    """The prompt, which the other server has rendered."""


class ChatRequest(ConversationFields, SamplingFields):
    """The body of POST /v1/chat/completions."""

    taken_here: ClassVar[frozenset[str]] = frozenset(
        {"kv_transfer_params", "reasoning_effort", "thinking_token_budget"}
    )

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    # Clients of vLLM send these as text, too.
    logprobs: Annotated[bool, Field(strict=False)] | None = None
    top_logprobs: Annotated[int, Field(ge=-1, strict=False)] | None = None
    include_reasoning: bool | None = None
    """Whether the answer shows the model's reasoning; None: it does."""
    modalities: Annotated[list[str], Field(fail_fast=True)] | None = None
    functions: Any = None
    function_call: str | dict[str, Any] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    moderation: Any = None
    separate_reasoning: bool | None = None
    """Whether reasoning is split off at all; None: it is, if the server has a parser for it."""
    echo: bool | None = None
    kv_transfer_params: TransferParams | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """For chat templates; with "none", those that know `enable_thinking` forbid reasoning."""
    return_prompt_text: bool | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """For chat templates that show documents to the model."""

    def check(self) -> None:
        """Check the fields together.

        Raises:
            ApiError: 400, the fields contradict each other or ask for something unsupported.
        """
        self.check_supported()
        if self.top_logprobs and not self.logprobs:
            raise bad_request(
                "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.", "top_logprobs"
            )
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_request("Set 'max_completion_tokens' or 'max_tokens', not both.", "max_tokens")
        refuse_if(self.modalities not in (None, ["text"]), "modalities", "Only the modality 'text' is supported.")
        refuse_if(self.audio is not None, "audio", "Audio is not supported.")
        refuse_if(bool(self.functions), "functions", "'functions' is not supported: use 'tools'.")
        refuse_if(
            self.function_call not in (None, "none", "auto"),
            "function_call",
            "'function_call' is not supported: use 'tool_choice'.",
        )
        refuse_if(self.moderation is not None, "moderation", "Moderation is not supported.")
        refuse_if(self.web_search_options is not None, "web_search_options", "Web search is not supported.")

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template that the request sets."""
        variables: dict[str, Any] = {} if self.documents is None else {"documents": self.documents}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            variables["enable_thinking"] = self.reasoning_effort != "none"
        return {**variables, **super().template_variables}

    @property
    def answer_role(self) -> str:
        """Whose message the answer is if it continues the last one; empty: the answer is a message of its own."""
        return self.messages[-1].role if self.add_generation_prompt is False else ""

    @property
    def reports_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def echoed_text(self) -> str:
        """The text to repeat before the answer: the last message if `echo` asks for it and its role is the answer's."""
        last = self.messages[-1]
        if not self.echo or last.role != (self.answer_role or "assistant"):
            return ""
        return text_content(last.for_template().get("content"), -1)

    @property
    def rendered_ids(self) -> list[int] | None:
        """The prompt that another server has rendered; None: `messages` are to be rendered, as for `echo`."""
        return None if self.kv_transfer_params is None or self.echo else self.kv_transfer_params.prompt_token_ids

    @property
    def token_limit(self) -> int | None:
        """Maximal number of tokens to generate. None: up to the model's maximum length."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
