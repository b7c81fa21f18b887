"""The middleware that the configuration asks for: CORS, and the user's own of --middleware."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from shardline.config.server import ServerConfig

if TYPE_CHECKING:
    from starlette.middleware import Middleware
    from starlette.types import ASGIApp, Receive, Scope, Send


def cors(config: ServerConfig) -> list[Middleware]:
    """What lets pages of the allowed origins read answers; nothing if there are none."""
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware

    from shardline.server.middleware import IGNORED_HEADER

    if not config.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=config.cors_methods,
            allow_headers=config.cors_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=["X-Request-Id", "Retry-After", IGNORED_HEADER],
        )
    ]


def load_middleware(config: ServerConfig) -> list[Any]:
    """What the import paths of --middleware name: classes of ASGI middleware, and async functions.

    Raises:
        ValueError: a path leads nowhere, or to something else.
    """
    found = []
    for path in config.middleware:
        module, _, name = path.rpartition(".")
        try:
            value = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"--middleware {path}: cannot be imported ({error}); is its folder in PYTHONPATH?"
            ) from error
        if not (inspect.isclass(value) or inspect.iscoroutinefunction(value)):
            raise ValueError(f"--middleware {path} must be a class or an async function, got {type(value).__name__}")
        found.append(value)
    return found


def user_middleware(config: ServerConfig) -> list[Middleware]:
    """The same as a server stacks it: the last one is the outermost, as if each were added to the application."""
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware

    stack = []
    for one in reversed(load_middleware(config)):
        is_class: bool = inspect.isclass(one)
        stack.append(Middleware(one) if is_class else Middleware(BaseHTTPMiddleware, dispatch=one))
    return [Middleware(WholeStreamMiddleware), *stack] if stack else []


class WholeStreamMiddleware:
    """Lets all of a stream pass through the middleware inside, which would otherwise miss what is written at once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        from shardline.server.sse import WRITE_NOW

        scope.pop(WRITE_NOW, None)
        await self._app(scope, receive, send)
