"""What the handlers share: the engine, the configuration, the metrics and common checks."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.config.server import ServerConfig
from shardline.metrics.server import ServerMetrics
from shardline.server.errors import ApiError, bad_request, draining, engine_dead, unavailable
from shardline.server.in_flight import InFlight
from shardline.server.keys import ApiKeys
from shardline.server.request_log import RequestLog
from shardline.server.tracing import RequestTracer
from shardline.text.chat_template import ChatTemplate, render_and_encode
from shardline.text.reasoning_parsers import find_reasoning_parser, guess_reasoning_parser
from shardline.text.reasoning_parsers.base import ReasoningParser
from shardline.text.tool_parsers import find_tool_parser, guess_tool_parser
from shardline.text.tool_parsers.base import ToolParser

if TYPE_CHECKING:
    from shardline.api.async_llm import AsyncLLM
    from shardline.text.tokenizer import Tokenizer

RETRY_STARTING_SECONDS = 2


@dataclass(frozen=True)
class Service:
    """One served model."""

    llm: AsyncLLM
    config: ServerConfig
    metrics: ServerMetrics
    keys: ApiKeys
    in_flight: InFlight = field(default_factory=InFlight)
    request_log: RequestLog = field(default_factory=RequestLog)
    tracer: RequestTracer | None = None
    """None: no spans are sent."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names under which the model is served; responses contain the first one."""
        return self.config.served_model_name or (self.llm.config.model.model,)

    def check_config(self) -> None:
        """Parse the configured chat template, if there is one, and look the configured parsers up.

        Raises:
            ValueError: the template cannot be read, it does not parse, or there is no such parser.
        """
        if self._template_source is not None:
            ChatTemplate(self._template_source)
        if self.config.tool_call_parser != "auto":
            find_tool_parser(self.config.tool_call_parser)
        if self.config.reasoning_parser:
            find_reasoning_parser(self.config.reasoning_parser)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The configured template, else the model's. None: there is neither. Valid once the engine is ready."""
        if self._template_source is None:
            return self.llm.chat_template
        tokenizer = self.llm.tokenizer
        return ChatTemplate(self._template_source, tokenizer.special_tokens if tokenizer is not None else None)

    @cached_property
    def tool_parser(self) -> type[ToolParser] | None:
        """The parser of tool calls; None: the template shows no known format. Valid once the engine is ready."""
        name: str | None = self.config.tool_call_parser
        if name == "auto":
            name = guess_tool_parser(self.template_text)
        return None if name is None else find_tool_parser(name)

    @cached_property
    def template_text(self) -> str:
        """The sources of all chat templates, one after another. Valid once the engine is ready."""
        return "" if self.chat_template is None else "\n".join(self.chat_template.sources.values())

    @cached_property
    def reasoning_parser(self) -> type[ReasoningParser] | None:
        """The parser of reasoning; None: answers are not searched for it. Valid once the engine is ready."""
        name = self.config.reasoning_parser or guess_reasoning_parser(self.template_text)
        return find_reasoning_parser(name) if name else None

    @cached_property
    def _template_source(self) -> str | None:
        value = self.config.chat_template
        if value is None or "{" in value:
            return value
        try:
            return Path(value).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"--chat-template: cannot read {value!r} ({error}); give a file, or the template itself"
            ) from error

    async def require_ready(self) -> None:
        """Refuse a request while the engine accepts none. (FastAPI would call a plain function on a thread.)

        Raises:
            ApiError: 503.
        """
        state = self.llm.state()
        if state == "starting":
            raise unavailable("The model is still loading; try again later.", "starting", RETRY_STARTING_SECONDS)
        if state == "recovering":
            raise unavailable(
                "The engine has failed and is restarting; try again later.", state, RETRY_STARTING_SECONDS
            )
        if state == "draining":
            raise draining()
        if state == "dead":
            raise engine_dead(self.llm.dead_reason)

    async def require_generating(self) -> None:
        """Refuse a request for text if the server embeds prompts.

        Raises:
            ApiError: 400.
        """
        if self.llm.config.embeds:
            message = "This server embeds prompts (--runner pooling): use /v1/embeddings."
            raise bad_request(message, code="unsupported_parameter")

    async def require_embedding(self) -> None:
        """Refuse a request for vectors if the server generates text.

        Raises:
            ApiError: 400.
        """
        if not self.llm.config.embeds:
            message = "This server generates text: start one with --runner pooling for embeddings."
            raise bad_request(message, code="unsupported_parameter")

    def require_model(self, name: str | None) -> None:
        """Refuse a request for another model. A request without a name means the served model.

        Raises:
            ApiError: 404, the model `name` is not served here.
        """
        if name is not None and name not in self.model_names:
            served = ", ".join(f"`{known}`" for known in self.model_names)
            raise ApiError(
                404,
                f"The model `{name}` does not exist or you do not have access to it. Served here: {served}.",
                param="model",
                code="model_not_found",
            )

    def require_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ApiError: 400, the model has no tokenizer.
        """
        if self.llm.tokenizer is None:
            raise bad_request("The model has no tokenizer; send prompts to /v1/completions as token ids.")
        return self.llm.tokenizer

    async def encode_prompt(self, text: str, add_special_tokens: bool, *, max_tokens: int | None = None) -> list[int]:
        """The token ids of a prompt; `max_tokens`: see `ConversationFields.encode_messages`.

        Raises:
            ApiError: 400, it is certainly longer than the model supports, or the model has no tokenizer.
        """
        tokenizer = self.require_tokenizer()
        await self._check_length(text, tokenizer, self.llm.max_model_len if max_tokens is None else max_tokens)
        return await tokenizer.encode_text_async(text, add_special_tokens)

    async def _check_length(self, text: str, tokenizer: Tokenizer, limit: int) -> None:
        if len(text) <= limit:
            return  # it is short: encoding it costs little
        if await asyncio.to_thread(tokenizer.exceeds, text, limit):
            raise bad_request(
                f"The prompt has {len(text)} characters, which are more than {limit} tokens, the most that are taken.",
                "prompt",
                "context_length_exceeded",
            )

    def decode_tokens(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of `token_ids`.

        Raises:
            ApiError: 400, a number is not a token id, or the model has no tokenizer.
        """
        try:
            return self.require_tokenizer().decode(token_ids, skip_special_tokens)
        except OverflowError as error:
            raise bad_request("Token ids must not be negative or larger than 32 bits.") from error

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        max_tokens: int | None,
        param: str,
    ) -> tuple[str, list[int]]:
        """The prompt of a conversation, as text and as token ids; see `render_and_encode`.

        The chat template runs on a thread, since it may be slow. `param`: the field of the request with the messages.

        Raises:
            ApiError: 400, there is no template, or the template refuses the messages.
        """
        tokenizer = self.require_tokenizer()
        template = self.chat_template
        if template is None:
            raise bad_request(
                "The model has no chat template: use /v1/completions, or start the server with --chat-template."
            )
        try:
            return await asyncio.to_thread(
                render_and_encode,
                template,
                tokenizer,
                messages,
                add_special_tokens=add_special_tokens,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=variables,
                max_tokens=max_tokens,
            )
        except ValueError as error:
            raise bad_request(str(error), param) from error


def cache_config(llm: AsyncLLM) -> dict[str, str]:
    """The KV cache's configuration, as labels of a metric."""
    cache = llm.config.cache
    return {
        "block_size": str(llm.block_size),
        "num_gpu_blocks": str(sum(one.kv_blocks_total for one in llm.stats())),
        "cache_dtype": cache.kv_cache_dtype,
        "enable_prefix_caching": str(cache.enable_prefix_caching),
        "gpu_memory_utilization": str(cache.gpu_memory_utilization),
    }


def new_id(prefix: str) -> str:
    """A new id, for example cmpl-1f0c…; the client's own id may not be unique."""
    return f"{prefix}-{uuid.uuid4().hex}"
