"""What the requests to pooled models have in common: their prompts, and how these are run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from shardline.api.pooling import Pooler, PoolingParams, PoolingTask, Values, pooling_request
from shardline.api.prompts import EncodedPrompt
from shardline.server.errors import bad_request
from shardline.server.openai.chat.conversation import ConversationFields
from shardline.server.openai.chat.messages import Messages
from shardline.server.openai.completions.request import PromptValue, encode_prompt, list_prompts
from shardline.server.openai.generation import Generation, Prepared
from shardline.server.openai.ignored_fields import IgnoredFields
from shardline.server.openai.protocol import refuse_if, truncate_prompt
from shardline.server.openai.whole_answer import wait_finished
from shardline.server.prompts import encode_text
from shardline.server.service import Service


class PoolingUsage(msgspec.Struct, frozen=True):
    """Number of tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class PoolingFields(IgnoredFields):
    """The fields of every request that is pooled."""

    model: str | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    """Keep only that many of a prompt's tokens; -1: as many as the model takes."""
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    """Whether vectors get the length 1, and logits become scores; None: they do."""
    padding: Literal["do_not_pad"] | None = None
    """Accepted, but has no effect: nothing is padded."""

    def truncate(self, service: Service, token_ids: list[int]) -> list[int]:
        """The part of a prompt that `truncate_prompt_tokens` leaves.

        Raises:
            ApiError: 400, the number is not positive, or larger than what the model takes.
        """
        longest, count = service.llm.model.max_model_len, self.truncate_prompt_tokens
        if count is not None and count > longest:
            raise bad_request(
                f"truncate_prompt_tokens ({count}) cannot be greater than max_model_len ({longest}): select a smaller "
                "truncation size.",
                "truncate_prompt_tokens",
            )
        most = longest - 1 if count == -1 else count
        return truncate_prompt(token_ids, most, self.truncation_side or "left")

    async def encode_text(self, service: Service, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
        """The token ids of one prompt, truncated if the request asks for it.

        Raises:
            ApiError: 400, it is certainly too long, or the model has no tokenizer.
        """
        if isinstance(prompt, str) and self.truncate_prompt_tokens is not None:
            # A long text is fine here.
            prompt = await encode_text(service, prompt, add_special_tokens, max_tokens=len(prompt))
        return self.truncate(service, await encode_prompt(service, prompt, add_special_tokens))


class PromptFields(PoolingFields, ConversationFields):
    """The fields of a request whose prompts are texts, token ids, or one conversation."""

    input: PromptValue | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None

    async def encode_prompts(self, service: Service) -> list[list[int]]:
        """The token ids of each prompt.

        Raises:
            ApiError: 400, there is not one of `input` and `messages`, or it cannot be encoded.
        """
        refuse_if(bool(self.tools), "tools", "'tools' are not taken here: the model calls none.")
        if (self.input is None) == (self.messages is None):
            raise bad_request("Send 'input' or 'messages'.", "input", "missing_required_parameter")
        if self.messages is None:
            assert self.input is not None
            with_special = self.add_special_tokens is not False
            prompts = list_prompts(self.input, "input")
            return [await self.encode_text(service, prompt, with_special) for prompt in prompts]
        # Unlike a chat, the prompt ends with the last message.
        fields = self.model_copy(update={"add_generation_prompt": self.add_generation_prompt or False})
        chat = await fields.encode_messages(service, self.messages, bool(self.add_special_tokens))
        return [self.truncate(service, chat.token_ids)]


def require_task(service: Service, task: PoolingTask) -> Pooler:
    """The model's pooler.

    Raises:
        ApiError: 400, the model does not do what `task` asks for.
    """
    pooler = require_pooler(service)
    try:
        pooler.check_task(task)
    except ValueError as error:
        raise bad_request(f"{error}.", code="unsupported_parameter") from error
    return pooler


def require_pooler(service: Service) -> Pooler:
    """The model's pooler. The route has made sure that it has one."""
    pooler = service.llm.model.pooler
    assert pooler is not None
    return pooler


MOST_NUMBERS = 1 << 24
"""The most numbers in one answer: they fill memory, and take long to write."""
MOST_TOKENS = 1 << 22
"""The most tokens of one request whose prompts share a text, so that they may be much longer than its body."""


def check_tokens(count: int, param: str) -> None:
    """Refuse a request whose prompts have more than `MOST_TOKENS` tokens; `param`: the field with most of the texts.

    Raises:
        ApiError: 400.
    """
    refuse_if(
        count > MOST_TOKENS, param, f"The prompts have {count} tokens or more; at most {MOST_TOKENS} are taken at once."
    )


async def pool_prompts(
    service: Service,
    body: PoolingFields,
    prompts: Sequence[list[int]],
    task: PoolingTask,
    *,
    request_id: str,
    param: str,
    dimensions: int | None = None,
) -> list[Values]:
    """What each prompt is pooled to; `param` is the field of the request that has the prompts.

    Raises:
        ApiError: 400, a prompt is invalid, or the answer would be too large; see `Generation.start`.
    """
    pooler = require_task(service, task)
    rows = sum(map(len, prompts)) if task.startswith("token_") else len(prompts)
    refuse_if(
        rows * pooler.size > MOST_NUMBERS,
        param,
        f"The answer would have {rows * pooler.size} numbers, and at most {MOST_NUMBERS} are sent; ask for fewer "
        "prompts, or shorter ones, in each request.",
    )
    generation = await Generation.start(
        service,
        Prepared(prompts=list(map(EncodedPrompt, prompts)), params=pooling_request(task), param=param),
        request_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        model=body.model,
    )
    async with generation:
        outputs = await wait_finished(generation)
    params = PoolingParams(use_activation=body.use_activation, dimensions=dimensions)
    try:
        return [pooler.pool(output, task, params) for output in outputs]
    except ValueError as error:
        raise bad_request(str(error), "dimensions") from error


def pooling_usage(prompts: Sequence[Sequence[int]]) -> PoolingUsage:
    """The usage of a request with these prompts."""
    count = sum(map(len, prompts))
    return PoolingUsage(count, count)
