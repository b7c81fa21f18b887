"""What clients hear if the engine does not admit their request."""

from __future__ import annotations

from shardline.api.errors import ContextLengthExceeded, EngineDead, EngineDraining, EngineRecovering, QueueFull
from shardline.server.errors import ApiError, bad_request, draining, engine_dead, unavailable
from shardline.server.openai.protocol import bad_parameter

RETRY_QUEUE_FULL_SECONDS = 1
"""After which a client may try again."""
RETRY_RECOVERING_SECONDS = 2
"""The same while replicas start again."""


def as_api_error(error: BaseException, prompt_param: str) -> ApiError | None:
    """The answer to a request that was not admitted. None: the error is not meant for clients."""
    if isinstance(error, EngineDraining):
        return draining()
    if isinstance(error, EngineRecovering):
        return unavailable(str(error), "recovering", RETRY_RECOVERING_SECONDS)
    if isinstance(error, EngineDead):
        return engine_dead(str(error))
    if isinstance(error, QueueFull):
        return ApiError(
            429, str(error), type="rate_limit_error", code="rate_limit_exceeded", retry_after=RETRY_QUEUE_FULL_SECONDS
        )
    if isinstance(error, ContextLengthExceeded):
        return bad_request(str(error), prompt_param, "context_length_exceeded")
    if isinstance(error, ValueError):
        return bad_parameter(str(error))
    return None
