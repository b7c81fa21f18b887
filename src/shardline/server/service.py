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
from shardline.text.chat_template import ChatTemplate, render_and_encode

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
    in_flight: InFlight = field(default_factory=InFlight)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names under which the model is served; responses contain the first one."""
        return self.config.served_model_name or (self.llm.config.model.model,)

    def check_template(self) -> None:
        """Parse the configured chat template, if there is one.

        Raises:
            ValueError: it cannot be read, or it does not parse.
        """
        if self._template_source is not None:
            ChatTemplate(self._template_source)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The configured template, else the model's. None: there is neither. Valid once the engine is ready."""
        if self._template_source is None:
            return self.llm.chat_template
        tokenizer = self.llm.tokenizer
        return ChatTemplate(self._template_source, tokenizer.special_tokens if tokenizer is not None else None)

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
        variables: Mapping[str, Any],
    ) -> list[int]:
        """The prompt ids of a conversation. The chat template runs on a thread, since it may be slow.

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
            _, ids = await asyncio.to_thread(
                render_and_encode,
                template,
                tokenizer,
                messages,
                add_special_tokens=add_special_tokens,
                add_generation_prompt=add_generation_prompt,
                variables=variables,
            )
        except ValueError as error:
            raise bad_request(str(error), "messages") from error
        return ids


def new_id(prefix: str) -> str:
    """A new id, for example cmpl-1f0c…; the client's own id may not be unique."""
    return f"{prefix}-{uuid.uuid4().hex}"
