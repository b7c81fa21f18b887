"""Endpoints for operators: probes, the version, metrics, and where the time of a request went."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from shardline import __version__, env
from shardline.server.documentation import Responses, json_answers
from shardline.server.errors import RETRY_STARTING_SECONDS, ApiError, bad_request
from shardline.server.observer import MAX_REQUESTS
from shardline.server.service import Service
from shardline.server.window import Cluster
from shardline.server.window.feed import ClusterStream


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of the probes."""

    status: str
    reason: str = ""
    """Why the engine is dead; missing while it lives."""
    replicas: str = ""
    """How many replicas run; missing if all do."""


_PROBE_ANSWERS: Responses = {200: json_answers(Health)[200], 503: json_answers(Health)[200]}
_SCRAPE: Responses = {200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}}


def health_routes(service: Service) -> APIRouter:
    """The endpoints; only /cluster needs a key where one is set, since it names hosts and processes."""
    router = APIRouter()

    def answer(healthy: bool) -> Response:
        state: str = service.llm.state()
        if state == "ready" and not healthy:
            state = "leaving"
        alive = service.llm.replicas_alive()
        body = Health(
            state,
            reason=service.llm.dead_reason if state == "dead" else "",
            replicas="" if all(alive) else f"{sum(alive)} of {len(alive)} alive",
        )
        headers = (
            {"Retry-After": str(RETRY_STARTING_SECONDS)}
            if state in ("starting", "recovering") and not healthy
            else None
        )
        return Response(msgspec.json.encode(body), 200 if healthy else 503, headers, "application/json")

    @router.head("/live", include_in_schema=False)
    @router.get("/live", responses=_PROBE_ANSWERS)
    async def live() -> Response:
        """Whether the process should go on running: 503 only after the engine has died."""
        return answer(service.llm.state() != "dead")

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", responses=_PROBE_ANSWERS)
    async def ready() -> Response:
        """Whether clients should send new requests here: 503 also while starting, recovering, leaving or draining."""
        return answer(service.llm.state() == "ready" and not service.leaving.is_set())

    @router.get("/ping", responses=_PROBE_ANSWERS)
    @router.post("/ping", responses=_PROBE_ANSWERS)
    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=_PROBE_ANSWERS)
    async def health() -> Response:
        """Whether the engine works: 200 also while draining, since it still finishes its requests."""
        return answer(service.llm.state() in ("ready", "draining"))

    @router.get("/load", responses=json_answers(dict[str, int]))
    async def load() -> Response:
        """How many requests are being answered."""
        return Response(msgspec.json.encode({"server_load": len(service.in_flight)}), media_type="application/json")

    @router.get("/cluster", responses=json_answers(Cluster, streams=True), response_class=Response)
    async def cluster(request: Request, history: bool = True) -> Response:
        """Hosts, replicas and ranks now, and the last ten minutes; server-sent events with Accept: text/event-stream,
        one a second, of which the first has the history."""
        if "text/event-stream" in request.headers.get("accept", ""):
            return ClusterStream(service.window)
        return Response(service.window.body(history=history), media_type="application/json")

    @router.get(
        "/get_load", responses=json_answers(list[dict[str, int]]), dependencies=[Depends(service.require_ready)]
    )
    async def get_load() -> Response:
        """The requests of each replica, and the tokens whose keys and values it holds for them, as SGLang says it."""
        loads = [
            {
                "dp_rank": index,
                "num_reqs": stats.num_running + stats.num_waiting,
                "num_waiting_reqs": stats.num_waiting,
                "num_tokens": stats.kv_blocks_used * service.llm.model.block_size,
            }
            for index, stats in enumerate(service.llm.stats())
        ]
        return Response(msgspec.json.encode(loads), media_type="application/json")

    @router.get("/version", responses=json_answers(dict[str, str]))
    async def version() -> Response:
        """The version of Shardline."""
        return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")

    if service.config.enable_metrics:

        @router.get("/metrics", responses=_SCRAPE, response_class=Response)
        async def metrics(request: Request) -> Response:
            """Prometheus metrics."""
            body, content_type = service.metrics.expose(request.headers.get("accept", ""))
            return Response(body, headers={"Content-Type": content_type})

    return router


def admin_routes(service: Service) -> APIRouter:
    """The endpoints. They need the admin key, where one is set."""
    router = APIRouter()
    ready = Depends(service.require_ready)

    @router.get("/requests/{request_id}", responses=json_answers(dict[str, Any]))
    async def get_request(request_id: str) -> Response:
        """Where the time of a request went."""
        body = service.observer.log.find(request_id)
        if body is None:
            raise ApiError(
                404,
                f"No request `{request_id}` runs here or is among the last (at most {MAX_REQUESTS}) that finished.",
                code="request_not_found",
            )
        return Response(msgspec.json.encode(body), media_type="application/json")

    @router.post("/reset_prefix_cache", responses=json_answers(dict[str, bool]), dependencies=[ready])
    async def reset_prefix_cache() -> Response:
        """Let later requests find no prefix that is cached now; those that run keep theirs."""
        service.llm.reset_prefix_cache()
        return Response(b'{"success":true}', media_type="application/json")

    @router.get("/server_info", responses=json_answers(dict[str, Any]))
    async def server_info(config_format: str = "text") -> Response:
        """What was asked for when the server started, without secrets, and what tokens depend on besides requests.

        `vllm_config` is text or json.
        """
        if config_format not in ("text", "json"):
            raise bad_request(f"config_format must be text or json, got {config_format!r:.80}.", "config_format")
        config = shown_config(service)
        body: dict[str, Any] = {
            "vllm_config": config if config_format == "json" else repr(config),
            "vllm_env": {name: value for name, value in env.vllm_variables().items() if "KEY" not in name},
            "system_env": {"version": __version__, "python": sys.version.split()[0]},
        }
        if service.llm.state() != "starting":
            contract = service.llm.model.contract
            own = {"sha256": contract.sha256, "system_fingerprint": contract.fingerprint}
            body["numeric_contract"] = {**msgspec.structs.asdict(contract), **own}
        return Response(msgspec.json.encode(body), media_type="application/json")

    return router


_SECRETS = ("api_key", "admin_api_key", "hf_token", "join_token")


def shown_config(service: Service) -> dict[str, Any]:
    """The configuration as an object, without secrets."""
    config = {**dataclasses.asdict(service.llm.config), "server": dataclasses.asdict(service.config)}
    return {part: {k: v for k, v in values.items() if k not in _SECRETS} for part, values in config.items()}
