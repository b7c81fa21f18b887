"""Prompts as texts or token ids, one or several, as completions and embeddings take them."""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import Field

from shardline.server.errors import bad_request
from shardline.server.openai.protocol import TokenIds
from shardline.server.service import Service

MAX_PROMPTS = 2048
"""Largest number of prompts in one request, as at OpenAI."""

Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True)]
PromptValue = str | Texts | TokenIds | TokenIdLists


def list_prompts(value: PromptValue, param: str) -> list[str | list[int]]:
    """The prompts as a list; `param`: the field that has them.

    Raises:
        ApiError: 400, there are none or too many.
    """
    if isinstance(value, str):
        return [value]
    if not value:
        raise bad_request(f"'{param}' must not be empty.", param)
    if isinstance(value[0], int):
        return [value]  # the first item tells a list of ids from a list of prompts
    if len(value) > MAX_PROMPTS:
        raise bad_request(f"'{param}' has {len(value)} entries; at most {MAX_PROMPTS} are taken in one request.", param)
    return list(value)


async def encode_prompt(service: Service, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
    """The token ids of one prompt.

    Raises:
        ApiError: 400, it is certainly too long, or the model has no tokenizer.
    """
    # Many short prompts must not keep other streams waiting.
    await asyncio.sleep(0)
    return await service.encode_prompt(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
