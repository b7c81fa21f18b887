"""What requests add to the logits of tokens. JSON has no numbers as keys, so the ids are texts."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

from shardline.server.errors import bad_request

_TOKEN_ID = re.compile(r"-?\d{1,18}", re.ASCII)
MAX_BIASES = 4096
_MAX_NAMED = 16
"""The most wrong entries that one error names."""


def _check_size(value: Any) -> Any:
    """Refuse a huge object before its members are looked at."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} entries are taken")
    return value


LogitBias = Annotated[dict[str, float], BeforeValidator(_check_size)]


def parse_bias(bias: LogitBias) -> dict[int, float]:
    """The biases by token ids.

    Raises:
        ApiError: 400, a key is no id.
    """
    wrong = [token_id for token_id in bias if not _TOKEN_ID.fullmatch(token_id)]
    if wrong:
        named = ", ".join(repr(token_id[:64]) for token_id in wrong[:_MAX_NAMED])
        more = f", and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        message = f"Invalid value for 'logit_bias': its keys must be token ids, unlike {named}{more}."
        raise bad_request(message, "logit_bias")
    return {int(token_id): value for token_id, value in bias.items()}
