"""What can go wrong with a request that is not the request's own fault (that is a ValueError)."""

from __future__ import annotations


class QueueFull(Exception):
    """Too many requests wait already; the client should come back later (HTTP 429)."""


class EngineDead(RuntimeError):
    """No replica is left to run the request (HTTP 503); the message says why."""


class EngineDraining(RuntimeError):
    """The engine finishes what it has and takes nothing new (HTTP 503)."""
