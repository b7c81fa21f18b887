"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, ValidationError

from shardline.server.errors import bad_request
from shardline.server.openai.ignored_fields import check_metadata
from shardline.server.openai.messages import ConversationFields
from shardline.server.openai.protocol import ResponseFormat, SamplingFields, refuse_if
from shardline.server.openai.request_model import RequestModel
from shardline.server.openai.responses.input_items import Items
from shardline.server.openai.tools import MAX_TOOLS, FunctionDefinition, Tool

LOGPROBS = "message.output_text.logprobs"
_UNUSED_TOOL_FIELDS = frozenset({"type", "output_schema", "allowed_callers", "defer_loading", "async"})


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

    taken_here: ClassVar[frozenset[str]] = frozenset({"store", "metadata"})

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
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    reasoning: dict[str, Any] | None = None
    """Accepted, but has no effect; the response repeats it."""
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: str | None = None
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
        for name in ("return_token_ids", "return_metrics", "logits_digest", "prompt_logprobs"):
            refuse_if(
                getattr(self, name) not in (None, False),
                name,
                f"'{name}' is not supported here: use /v1/chat/completions.",
            )
        refuse_if(
            bool(self.background), "background", "Responses in the background are not supported: set it to false."
        )
        refuse_if(
            self.truncation not in (None, "disabled"),
            "truncation",
            "Only the truncation 'disabled' is supported: send a shorter input.",
        )
        for name in ("conversation", "context_management", "moderation", "access_programs", "image", "prompt"):
            refuse_if(getattr(self, name) is not None, name, f"'{name}' is not supported: leave it out.")

    @property
    def conversation_fields(self) -> ConversationFields:
        """The fields that control how messages become a prompt.

        Raises:
            ApiError: 400, a tool is not a function.
        """
        tools = [_read_tool(tool, index) for index, tool in enumerate(self.tools or ())]
        choice = self.tool_choice
        if isinstance(choice, dict):
            refuse_if(
                choice.get("type") != "function",
                "tool_choice",
                "'tool_choice' may be 'none', 'auto', 'required' or {\"type\": \"function\", \"name\": \"…\"}.",
            )
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        return ConversationFields(
            tools=tools or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    @property
    def text_format(self) -> ResponseFormat | None:
        """`text.format` as chats have it."""
        wanted = None if self.text is None else self.text.format
        if wanted is None:
            return None
        return ResponseFormat(type=wanted.type, json_schema={"schema": wanted.schema_})

    @property
    def num_logprobs(self) -> int | None:
        """The number of most likely tokens to report with each token; None: no log probabilities."""
        asked = self.top_logprobs is not None or LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if asked else None


def _read_tool(tool: dict[str, Any], index: int) -> Tool:
    kind = tool.get("type")
    refuse_if(
        kind != "function",
        f"tools[{index}].type",
        f"Tools of the type {kind!r} are not supported: offer functions.",
    )
    try:
        function = FunctionDefinition(**{k: v for k, v in tool.items() if k not in _UNUSED_TOOL_FIELDS})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in (f"tools[{index}]", *first["loc"]))
        raise bad_request(f"Invalid value for '{name}': {first['msg']}.", name, "invalid_value") from error
    return Tool(type="function", function=function)
