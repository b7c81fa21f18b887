"""Why a request is not admitted. A ValueError says that the request is at fault; the others say that it is not."""

from __future__ import annotations


class ContextLengthExceeded(ValueError):
    """The prompt leaves no room for output (HTTP 400, code context_length_exceeded)."""


class QueueFull(Exception):
    """Too many requests are waiting; the client should try again later (HTTP 429)."""


class EngineDead(RuntimeError):
    """No replica is left to run the request (HTTP 503); the message says why."""


class EngineRecovering(RuntimeError):
    """Every replica has failed, and at least one restarts; the client should try again later (HTTP 503)."""


class EngineDraining(RuntimeError):
    """The engine finishes its requests and accepts no new ones (HTTP 503)."""


class RequestDiffers(ValueError):
    """The request would not be here what it was where it began (HTTP 409)."""
