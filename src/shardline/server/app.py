"""The HTTP application: every endpoint and what every request passes through, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from shardline import __version__
from shardline.config.server import ServerConfig
from shardline.metrics.registry import ServerMetrics
from shardline.server.handlers import install_error_handlers
from shardline.server.health import health_routes
from shardline.server.middleware import AccessMiddleware, AuthMiddleware, BodyLimitMiddleware, InFlightMiddleware
from shardline.server.openai.chat import chat_routes
from shardline.server.openai.completions import completion_routes
from shardline.server.openai.models import model_routes
from shardline.server.openai.tokenize import tokenize_routes
from shardline.server.service import Service

if TYPE_CHECKING:
    from shardline.api.async_llm import AsyncLLM


def create_app(llm: AsyncLLM, config: ServerConfig) -> FastAPI:
    """The application that serves `llm`, which need not be ready yet: until then it answers 503.

    `app.state.service` is its Service. Closing `llm` is left to the caller.

    Raises:
        ValueError: the configured chat template cannot be used.
    """
    model_name = (config.served_model_name or (llm.config.model.model,))[0]
    service = Service(llm, config, ServerMetrics(model_name, llm.stats))
    app = FastAPI(
        title="Shardline",
        version=__version__,
        middleware=_middleware(service),
        # The pages would load scripts from elsewhere; /openapi.json is served.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    service.check_template()
    app.state.service = service
    install_error_handlers(app)
    app.include_router(health_routes(service))

    async def require_ready() -> None:
        service.require_ready()

    for routes in (model_routes, completion_routes, chat_routes, tokenize_routes):
        app.include_router(routes(service), dependencies=[Depends(require_ready)])
    return app


def _middleware(service: Service) -> list[Middleware]:
    """From the outside in. CORS answers preflights, which carry no key; the body is counted before anyone reads it."""
    config = service.config
    stack = [
        Middleware(
            AccessMiddleware,
            count=service.metrics.count_response if config.enable_metrics else None,
            log=not config.disable_access_log,
        )
    ]
    if config.allowed_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        )
    if config.keys:
        stack.append(Middleware(AuthMiddleware, keys=config.keys))
    stack.append(Middleware(BodyLimitMiddleware, limit=config.body_limit))
    stack.append(Middleware(InFlightMiddleware, in_flight=service.in_flight))
    return stack
