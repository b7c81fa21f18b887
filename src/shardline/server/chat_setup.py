"""How a served model's chats are written and read: its template, and the parsers of its answers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardline.config.server import ServerConfig
from shardline.text.chat_template import ChatTemplate
from shardline.text.model_files import read_template
from shardline.text.reasoning_parsers import find_reasoning_parser, guess_reasoning_parser
from shardline.text.reasoning_parsers.base import ReasoningParser
from shardline.text.tool_parsers import find_tool_parser, guess_tool_parser
from shardline.text.tool_parsers.base import ToolParser

if TYPE_CHECKING:
    from shardline.api.async_llm import AsyncLLM

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatSetup:
    """What is configured, else what the model says."""

    template: ChatTemplate | None
    """None: there is neither."""
    template_text: str
    """The sources of all templates, one after another."""
    tool_parser: type[ToolParser] | None
    """The parser of tool calls; None: the template shows no known format."""
    reasoning_parser: type[ReasoningParser] | None
    """The parser of reasoning; None: answers are not searched for it."""


def check_chat_config(config: ServerConfig) -> ChatTemplate | None:
    """The configured template, compiled; None: there is none. The configured parsers are looked up, too.

    Raises:
        ValueError: the template cannot be read, it cannot be compiled, or there is no such parser.
    """
    if config.tool_call_parser != "auto":
        find_tool_parser(config.tool_call_parser)
    if config.reasoning_parser:
        find_reasoning_parser(config.reasoning_parser)
    if config.chat_template is None:
        return None
    try:
        return ChatTemplate(read_template(config.chat_template))
    except ValueError as error:
        raise ValueError(f"--chat-template: {error}") from error


def make_chat_setup(llm: AsyncLLM, config: ServerConfig, configured: ChatTemplate | None) -> ChatSetup:
    """The setup of an engine that is ready; `configured`: the configured template."""
    template = configured or llm.model.chat_template
    if configured is not None and llm.model.tokenizer is not None:
        configured.special_tokens = llm.model.tokenizer.special_tokens
    if template is None and config.trust_request_chat_template and llm.model.tokenizer is not None:
        template = ChatTemplate({}, llm.model.tokenizer.special_tokens)  # it renders the templates of requests
    if template is not None:
        template.content_as_parts = config.chat_template_content_format == "openai"
    text = "" if template is None else "\n".join(template.sources.values())

    tools = guess_tool_parser(text) if config.tool_call_parser == "auto" else config.tool_call_parser
    if config.tool_call_parser != "auto" and template is not None and not template.takes_tools:
        logger.warning("the chat template shows no tools to the model; give one that does by --chat-template")
    reasoning = config.reasoning_parser or guess_reasoning_parser(text)
    return ChatSetup(
        template,
        text,
        None if tools is None else find_tool_parser(tools),
        find_reasoning_parser(reasoning) if reasoning else None,
    )
