"""Log probabilities of tokens that a request names at positions of its prompt.

Each position is a request of its own to the engine, for one token after the prompt up to there. All of them share the
prefix, and the values have the bits that generation reports.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from shardline.server.errors import bad_request
from shardline.server.openai.named_tokens import MAX_NAMED, named_logprobs, score_named
from shardline.server.openai.protocol import TokenIds
from shardline.server.service import Service

NAME = "prompt_logprob_token_ids"
MAX_TOKENS = 1 << 22
"""The most tokens of all rows' prompts together."""
PADDING = -1
"""In place of a token where a row has fewer than others."""

NamedRows = Annotated[list[TokenIds], Field(fail_fast=True)]
"""Row i has the tokens in the place of prompt token `start` + i + 1."""


def check_rows(service: Service, rows: NamedRows, start: int, prompt: Sequence[int]) -> None:
    """Check the rows of a prompt.

    Raises:
        ApiError: 400, they are not as many as positions, name too many tokens, or such that are none.
    """
    builder = service.llm.model.builder
    count = max(0, len(prompt) - 1 - start)
    if start < 0 or len(rows) != count:
        raise bad_request(
            f"{NAME} has {len(rows)} rows, but the prompt has {count} scored rows behind {start}.",
            NAME,
        )
    width = max(map(len, rows), default=0)
    if not 1 <= width <= MAX_NAMED:
        raise bad_request(f"{NAME} must have 1 to {MAX_NAMED} tokens in its longest row, not {width}.", NAME)
    try:
        builder.logprob_counts.count(NAME, width)
    except ValueError as error:
        raise bad_request(str(error), NAME) from error
    if not all(PADDING <= token_id < builder.vocab_size for row in rows for token_id in row):
        raise bad_request(
            f"{NAME} must have token ids from 0 to {builder.vocab_size - 1}, and {PADDING} as padding.", NAME
        )
    if (total := sum(range(start + 1, len(prompt)))) > MAX_TOKENS:
        raise bad_request(f"The prompts of all rows have {total} tokens; at most {MAX_TOKENS} are taken at once.", NAME)


async def score_rows(
    service: Service, rows: NamedRows, start: int, prompt: list[int], request_id: str, model: str | None, salt: str
) -> str:
    """The base64 of a file of numpy, [rows, tokens of the longest row] fp32; padding has -inf.

    Raises:
        ApiError: see `Generation.start`.
    """
    named = [(index, list(dict.fromkeys(row))) for index, row in enumerate(rows)]
    named = [(index, [one for one in row if one != PADDING]) for index, row in named]
    named = [(index, row) for index, row in named if row]
    values = np.full((len(rows), max(map(len, rows))), -np.inf, np.float32)
    if named:
        outputs = await score_named(
            service,
            [prompt[: start + index + 1] for index, _ in named],
            [row for _, row in named],
            request_id=f"{request_id}-rows",
            param=NAME,
            cache_salt=salt,
            model=model,
        )
        for (index, _), output in zip(named, outputs, strict=True):
            known = named_logprobs(output)
            values[index, : len(rows[index])] = [known.get(token_id, -np.inf) for token_id in rows[index]]
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
