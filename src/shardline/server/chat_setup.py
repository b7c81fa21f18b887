"""How a served model's chats are written and read: its template, and the parsers of its answers."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from shardline.config.server import ServerConfig
from shardline.text.chat_template import ChatTemplate
from shardline.text.reasoning_parsers import find_reasoning_parser, guess_reasoning_parser
from shardline.text.reasoning_parsers.base import ReasoningParser
from shardline.text.tool_parsers import find_tool_parser, guess_tool_parser
from shardline.text.tool_parsers.base import ToolParser

if TYPE_CHECKING:
    from shardline.api.async_llm import AsyncLLM


class ChatSetup:
    """What is configured, else what the model says. All but `check_config` is valid once the engine is ready."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self._llm = llm
        self._config = config
        self._configured: ChatTemplate | None = None

    def check_config(self) -> None:
        """Compile the configured template, if there is one, and look the configured parsers up.

        Raises:
            ValueError: the template cannot be read, it cannot be compiled, or there is no such parser.
        """
        if self._template_source is not None:
            try:
                self._configured = ChatTemplate(self._template_source)
            except ValueError as error:
                raise ValueError(f"--chat-template: {error}") from error
        if self._config.tool_call_parser != "auto":
            find_tool_parser(self._config.tool_call_parser)
        if self._config.reasoning_parser:
            find_reasoning_parser(self._config.reasoning_parser)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The configured template, else the model's. None: there is neither."""
        if self._configured is None:
            return self._llm.chat_template
        if self._llm.tokenizer is not None:
            self._configured.special_tokens = self._llm.tokenizer.special_tokens
        return self._configured

    @cached_property
    def template_text(self) -> str:
        """The sources of all templates, one after another."""
        return "" if self.template is None else "\n".join(self.template.sources.values())

    @cached_property
    def tool_parser(self) -> type[ToolParser] | None:
        """The parser of tool calls; None: the template shows no known format."""
        name: str | None = self._config.tool_call_parser
        if name == "auto":
            name = guess_tool_parser(self.template_text)
        return None if name is None else find_tool_parser(name)

    @cached_property
    def reasoning_parser(self) -> type[ReasoningParser] | None:
        """The parser of reasoning; None: answers are not searched for it."""
        name = self._config.reasoning_parser or guess_reasoning_parser(self.template_text)
        return find_reasoning_parser(name) if name else None

    @cached_property
    def _template_source(self) -> str | None:
        value = self._config.chat_template
        if value is None or "{" in value:
            return value
        try:
            return Path(value).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"--chat-template: cannot read {value!r} ({error}); give a file, or the template itself"
            ) from error
