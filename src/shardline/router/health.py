"""Looks at every backend, again and again: whether it is ready, and which models it serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from shardline.config.router import RouterConfig
from shardline.router.fleet import Backend, Fleet
from shardline.router.upstream import Header, UpstreamError

logger = logging.getLogger(__name__)

_ANSWER_BYTES = 1 << 20
_ANSWER_SECONDS = 5.0
"""In which a backend must answer, or the interval between two looks if that is longer."""
_MODELS_EVERY = 30
"""Looks between two questions for the models of a backend that is ready."""


async def watch_backends(fleet: Fleet, watch: Callable[[Backend], Coroutine[Any, Any, None]], pause: float) -> None:
    """Run `watch` for each backend, in a task of its own, so that a slow one delays no other; until cancelled.

    `pause`: seconds until a backend that comes or goes is noticed.
    """
    tasks: dict[Backend, asyncio.Task[None]] = {}
    try:
        while True:
            for backend in [backend for backend in tasks if backend not in fleet.backends]:
                tasks.pop(backend).cancel()
            for backend in fleet.backends:
                if backend in tasks and tasks[backend].done():
                    logger.error("backend %s is watched anew: %s", backend.url, tasks.pop(backend).exception())
                if backend not in tasks:
                    tasks[backend] = asyncio.create_task(watch(backend))
            await asyncio.sleep(pause)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


class HealthChecker:
    """Looks at backends."""

    def __init__(self, fleet: Fleet, config: RouterConfig) -> None:
        self._fleet = fleet
        self._interval = config.health_interval
        key = config.backend_api_key
        self._headers: list[Header] = [(b"authorization", b"Bearer " + key.encode())] if key else []

    async def run(self) -> None:
        """Look until the task is cancelled."""
        await watch_backends(self._fleet, self._watch, self._interval / 4)

    async def _watch(self, backend: Backend) -> None:
        looks = 0
        while True:
            problem = await self._find_problem(backend)
            if not problem and looks % _MODELS_EVERY == 0:
                problem = await self._read_models(backend)
            looks = 0 if problem else looks + 1
            self._fleet.note_health(backend, problem)
            await asyncio.sleep(self._interval)

    async def _find_problem(self, backend: Backend) -> str:
        """Why a backend is not ready; empty: it is."""
        for path in (b"/ready", b"/health"):
            try:
                answer = await self._get(backend, path)
            except UpstreamError as error:
                return str(error)
            if answer[0] not in (404, 405):
                return "" if answer[0] == 200 else f"GET {path.decode()} says {answer[0]}"
        return "it has neither /ready nor /health"

    async def _read_models(self, backend: Backend) -> str:
        """Ask for a backend's models. Returns the problem, or nothing."""
        try:
            status, body = await self._get(backend, b"/v1/models")
        except UpstreamError as error:
            return str(error)
        if status == 401:
            return "GET /v1/models says 401; pass its key as --backend-api-key"
        entries = _entries(body) if status == 200 else []
        backend.model_entries = tuple(entries)
        backend.models = tuple(str(entry["id"]) for entry in entries)
        backend.contract = str(entries[0].get("numeric_contract", "")) if entries else ""
        return ""

    async def _get(self, backend: Backend, path: bytes) -> tuple[int, bytes]:
        """The answer to GET. A backend that was ready and takes the connection may only be busy: it is asked twice."""
        seconds = max(_ANSWER_SECONDS, self._interval)
        try:
            return await backend.upstream.get(path, self._headers, seconds, _ANSWER_BYTES)
        except UpstreamError as error:
            if not (error.is_late and backend.is_ready):
                raise
        return await backend.upstream.get(path, self._headers, seconds, _ANSWER_BYTES)


def _entries(body: bytes) -> list[dict[str, Any]]:
    try:
        data = msgspec.json.decode(body)["data"]
        return [entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    except (msgspec.DecodeError, KeyError, TypeError):
        return []
