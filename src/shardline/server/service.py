"""What the handlers share: the engine, the configuration, the metrics and common checks."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardline import env
from shardline.checkpoints.package import usual_names
from shardline.config.server import ServerConfig
from shardline.metrics.server import ServerMetrics
from shardline.server.chat_setup import ChatSetup, make_chat_setup
from shardline.server.errors import (
    ApiError,
    bad_request,
    generates_nothing,
    generates_text,
    no_such_model,
    not_ready,
)
from shardline.server.keys import ApiKeys
from shardline.server.middleware import InFlight
from shardline.server.observer import RequestObserver
from shardline.server.window.feed import Window
from shardline.text.chat_template import ChatTemplate, Conversation, PromptTooLong, render_and_encode_async

if TYPE_CHECKING:
    from shardline.api.adapters import Adapters
    from shardline.api.async_llm import AsyncLLM
    from shardline.messages.request import AdapterRef
    from shardline.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Service:
    """One served model."""

    llm: AsyncLLM
    config: ServerConfig
    metrics: ServerMetrics
    observer: RequestObserver
    keys: ApiKeys
    window: Window
    configured_template: ChatTemplate | None = None
    in_flight: InFlight = field(default_factory=InFlight)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server is about to end: it takes requests, and says that new ones should go elsewhere."""
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def model_names(self) -> tuple[str, ...]:
        """The names under which the model is served; responses contain the first one."""
        return self.config.served_model_name or usual_names(self.llm.config.model.model)

    @cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """Sampling parameters of requests that leave them out; not before the engine is ready."""
        return {**self.llm.model.sampling_defaults, **({"receipt": True} if self.config.receipts else {})}

    @cached_property
    def chat(self) -> ChatSetup:
        """How chats are written and read; not before the engine is ready."""
        return make_chat_setup(self.llm, self.config, self.configured_template)

    async def require_ready(self) -> None:
        """Refuse a request while the engine accepts none. (FastAPI would call a plain function on a thread.)

        Raises:
            ApiError: 503.
        """
        state = self.llm.state()
        if state != "ready":
            raise not_ready(state, self.llm.dead_reason)

    async def require_generation(self) -> None:
        """Refuse a request for text if the model embeds or classifies.

        Raises:
            ApiError: 400.
        """
        tasks = self.llm.model.tasks
        if "generate" not in tasks:
            raise generates_nothing(tasks)

    async def refuse_generator(self) -> None:
        """Refuse a request for embeddings or scores if the model generates.

        Raises:
            ApiError: 400.
        """
        if "generate" in self.llm.model.tasks:
            raise generates_text()

    @cached_property
    def _takes_any_name(self) -> bool:
        return env.takes_any_model_name()

    @property
    def adapters(self) -> Adapters:
        """Those that requests may name as their model."""
        return self.llm.model.adapters

    def name_of(self, model: str | None) -> str:
        """The name that answers have for a request's model: that of its adapter, or the first of the model's."""
        return model if model is not None and model in self.adapters.named else self.model_names[0]

    def require_model(self, name: str | None) -> AdapterRef | None:
        """The adapter that a request names as its model; None: the served model, also for a request without a name.

        Raises:
            ApiError: 404, the model `name` is not served here.
        """
        if name is None or name in self.model_names:
            return None
        if (named := self.adapters.named.get(name)) is not None:
            return named.ref
        if not self._takes_any_name:
            raise no_such_model(name, [*self.model_names, *self.adapters.named])
        return None

    def require_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ApiError: 400, the model has no tokenizer.
        """
        if self.llm.model.tokenizer is None:
            raise bad_request("The model has no tokenizer; send prompts to /v1/completions as token ids.")
        return self.llm.model.tokenizer

    def too_long(self, message: str, param: str) -> ApiError:
        """A 400 that says how long the model's prompts may be."""
        length = f"This model's maximum context length is {self.llm.model.max_model_len} tokens."
        return bad_request(f"{length} {message}", param, "context_length_exceeded")

    async def encode_chat(self, chat: Conversation, *, max_tokens: int | None, param: str) -> tuple[str, list[int]]:
        """The prompt of a conversation, as text and as token ids; see `render_and_encode`.

        `param`: the field of the request with the messages.

        Raises:
            ApiError: 400, there is no template, or the template refuses the messages.
        """
        tokenizer = self.require_tokenizer()
        template = self.chat.template
        if template is None:
            raise bad_request(
                "The model has no chat template: use /v1/completions, or start the server with --chat-template."
            )
        in_content = self.config.special_tokens_in_content
        try:
            return await render_and_encode_async(
                template, tokenizer, chat, max_tokens=max_tokens, special_tokens_in_content=in_content
            )
        except PromptTooLong as error:
            raise self.too_long(str(error), param) from error
        except ValueError as error:
            raise bad_request(str(error), param) from error


def new_id(prefix: str) -> str:
    """A new id that begins with `prefix`, for example cmpl-1f0c…; the client's own id may not be unique."""
    return prefix + uuid.uuid4().hex
