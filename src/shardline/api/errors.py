"""What can go wrong with a request beyond a plain ValueError, which is the request's own fault."""

from __future__ import annotations


class ContextLengthExceeded(ValueError):
    """The prompt leaves no room for output (HTTP 400, code context_length_exceeded)."""


class QueueFull(Exception):
    """Too many requests wait already; the client should come back later (HTTP 429)."""


class EngineDead(RuntimeError):
    """No replica is left to run the request (HTTP 503); the message says why."""


class EngineDraining(RuntimeError):
    """The engine finishes what it has and takes nothing new (HTTP 503)."""
