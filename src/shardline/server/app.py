"""The HTTP application: its endpoints, its middleware and its answers to errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from shardline import __version__
from shardline.checkpoints.package import usual_names
from shardline.config.server import ServerConfig
from shardline.metrics.server import ServerMetrics
from shardline.server.anthropic.routes import message_routes
from shardline.server.chat_setup import check_chat_config
from shardline.server.cohere.routes import cohere_chat_routes
from shardline.server.documentation import documentation_routes
from shardline.server.error_shapes import error_answer
from shardline.server.errors import ApiError, bad_request, explain_validation, internal_error
from shardline.server.invocations import Invocations
from shardline.server.keys import ApiKeys
from shardline.server.middleware import (
    AccessMiddleware,
    AuthMiddleware,
    BodyLimitMiddleware,
    InFlightMiddleware,
    LoadReportMiddleware,
    SlashMiddleware,
    route_path,
)
from shardline.server.observer import RequestObserver
from shardline.server.openai.adapters import adapter_routes
from shardline.server.openai.batch.chat import batched_chat_routes
from shardline.server.openai.batch.routes import batch_routes, start_batches
from shardline.server.openai.models import model_routes, tokenize_routes
from shardline.server.openai.responses.routes import response_routes
from shardline.server.openai.routes import generating_routes
from shardline.server.operations import admin_routes, health_routes
from shardline.server.pooling.cohere import cohere_routes
from shardline.server.pooling.decisions import decision_routes
from shardline.server.pooling.generative import generative_scoring_routes
from shardline.server.pooling.routes import pooling_routes
from shardline.server.pooling.scores import score_routes
from shardline.server.scale_out.derender import derender_routes
from shardline.server.scale_out.generate import generate_routes
from shardline.server.scale_out.render import render_routes
from shardline.server.service import Service
from shardline.server.tracing import RequestTracer, TraceMiddleware
from shardline.server.ui import page_routes
from shardline.server.user_middleware import cors, user_middleware
from shardline.server.window.feed import Window
from shardline.text.special_tokens import TokenizerError

if TYPE_CHECKING:
    from shardline.api.async_llm import AsyncLLM


def create_app(llm: AsyncLLM, config: ServerConfig) -> FastAPI:
    """The application that serves `llm`. It answers 503 until `llm` is ready.

    `app.state.service` is its Service. The caller closes `llm`.

    Raises:
        ValueError: the configured chat template or a configured parser cannot be used.
    """
    model_name = (config.served_model_name or usual_names(llm.config.model.model))[0]
    metrics = ServerMetrics(
        model_name,
        llm.stats,
        config.metrics_prefix,
        lambda: _cache_config(llm),
        llm.num_refused,
        lambda: [engine[0].fallbacks if engine else () for engine in llm.ranks()],
    )
    tracer = RequestTracer(config.otlp_traces_endpoint, model_name) if config.otlp_traces_endpoint else None
    observer = RequestObserver(metrics.requests, tracer)
    window = Window(llm, model_name, metrics.requests.first_token, observer.log)
    service = Service(llm, config, metrics, observer, ApiKeys(config), window, check_chat_config(config))
    app = FastAPI(
        title="Shardline",
        version=__version__,
        middleware=_middleware(service),
        openapi_url=None if config.disable_fastapi_docs else "/openapi.json",
        # Those of the framework load scripts from other sites.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    _install_error_handlers(app)
    app.include_router(health_routes(service))
    app.include_router(admin_routes(service))
    if config.has_page:
        app.include_router(page_routes())
    ready = Depends(service.require_ready)
    generates, pools = [ready, Depends(service.require_generation)], [ready, Depends(service.refuse_generator)]
    app.include_router(model_routes(service), dependencies=[ready])
    app.include_router(adapter_routes(service))
    if not config.render_only:
        app.include_router(generate_routes(service), dependencies=generates)
    if not config.tokens_only:
        app.include_router(tokenize_routes(service), dependencies=[ready])
        app.include_router(render_routes(service), dependencies=generates)
        app.include_router(derender_routes(service), dependencies=generates)
    is_whole = not (config.tokens_only or config.render_only)
    if is_whole:
        for routes in (generating_routes, batched_chat_routes, response_routes, message_routes):
            app.include_router(routes(service), dependencies=generates)
        for routes in (cohere_chat_routes, generative_scoring_routes, decision_routes):
            app.include_router(routes(service), dependencies=generates)
        for routes in (cohere_routes, pooling_routes, score_routes):
            app.include_router(routes(service), dependencies=pools)
    app.state.batches = start_batches(app, service) if is_whole else None
    app.include_router(batch_routes(app.state.batches))
    app.router.routes.append(Route("/invocations", Invocations(app), methods=["POST"]))
    if not config.disable_fastapi_docs:
        app.include_router(documentation_routes(app))
    return app


def _cache_config(llm: AsyncLLM) -> dict[str, str]:
    """The KV cache's configuration, as labels of a metric; empty while the engine starts."""
    if llm.state() == "starting":
        return {}
    cache = llm.config.cache
    return {
        "block_size": str(llm.model.block_size),
        "kv_cache_size_tokens": str(int(llm.model.max_concurrency * llm.model.max_model_len)),
        "kv_cache_max_concurrency": f"{llm.model.max_concurrency:.2f}",
        "num_gpu_blocks": str(sum(stats.kv_blocks_total for stats in llm.stats())),
        "cache_dtype": cache.kv_cache_dtype,
        "enable_prefix_caching": str(cache.enable_prefix_caching),
        "gpu_memory_utilization": str(cache.gpu_memory_utilization),
    }


def _middleware(service: Service) -> list[Middleware]:
    """The middleware, outermost first. CORS comes before the keys, since preflight requests carry no key."""
    config = service.config
    stack = [
        Middleware(
            AccessMiddleware,
            answers=service.metrics.answers if config.enable_metrics else None,
            log=not config.disable_access_log,
            names_all=config.enable_request_id_headers,
        )
    ]
    stack += user_middleware(config)
    stack += cors(config)
    stack.append(Middleware(AuthMiddleware, keys=service.keys, has_page=config.has_page))
    stack.append(Middleware(SlashMiddleware))
    stack.append(Middleware(BodyLimitMiddleware, limit=config.body_limit, unlimited=("/v1/files",)))
    if service.observer.tracer is not None:
        stack.append(Middleware(TraceMiddleware))
    stack.append(Middleware(LoadReportMiddleware, stats=service.llm.stats))
    stack.append(Middleware(InFlightMiddleware, in_flight=service.in_flight))
    return stack


def _install_error_handlers(app: FastAPI) -> None:
    """Answer every error, also the framework's own, in the shape of its endpoint."""
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(TokenizerError, _answer_tokenizer_error)
    app.add_exception_handler(Exception, _answer_crash)


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _shaped(request, error)


async def _answer_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _shaped(request, explain_validation(error.errors(), error.body))


async def _answer_tokenizer_error(request: Request, error: Exception) -> Response:
    return _shaped(request, bad_request(str(error)))


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == 404:
        return _shaped(request, ApiError(404, f"Invalid URL ({request.method} {path})", code="unknown_url"))
    if error.status_code == 405:
        answer = ApiError(405, f"Not allowed to {request.method} on {path}.", code="method_not_allowed")
        answer.headers = {"Allow": ", ".join(_methods_of(request))}
        return _shaped(request, answer)
    return _shaped(request, ApiError(error.status_code, str(error.detail)))


def _methods_of(request: Request) -> list[str]:
    """The methods of a path. It may have several routes, and the framework names only one of them."""
    return [
        method
        for method in ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
        if any(route.matches({**request.scope, "method": method})[0] == Match.FULL for route in request.app.routes)
    ]


async def _answer_crash(request: Request, error: Exception) -> Response:
    # After this answer, the framework logs the traceback and raises the error again.
    return _shaped(request, internal_error())


def _shaped(request: Request, error: ApiError) -> Response:
    return error_answer(error, route_path(request.scope))
