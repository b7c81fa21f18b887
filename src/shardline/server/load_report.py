"""ORCA's load report: a header with the load of the engine, for balancers that ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardline.messages.stats import EngineStats

FORMAT_HEADER = "endpoint-load-metrics-format"


def load_report(report_format: str, stats: Sequence[EngineStats]) -> str | None:
    """The value of the header `endpoint-load-metrics`; None: the format is neither TEXT nor JSON."""
    total = sum(one.kv_blocks_total for one in stats)
    named = {
        "kv_cache_usage_perc": sum(one.kv_blocks_used for one in stats) / total if total else 0.0,
        "num_requests_waiting": float(sum(one.num_waiting for one in stats)),
    }
    if report_format.lower() == "text":
        return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
    if report_format.lower() == "json":
        return "JSON " + msgspec.json.encode({"named_metrics": named}).decode()
    return None


class LoadReportMiddleware:
    """Adds the report to answers whose request has FORMAT_HEADER."""

    def __init__(self, app: ASGIApp, stats: Callable[[], Sequence[EngineStats]]) -> None:
        self._app = app
        self._stats = stats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        asked = Headers(scope=scope).get(FORMAT_HEADER) if scope["type"] == "http" else None
        if not asked:
            await self._app(scope, receive, send)
            return

        async def send_with_report(message: Message) -> None:
            if message["type"] == "http.response.start" and (report := load_report(asked, self._stats())) is not None:
                message["headers"] = [*message.get("headers", ()), (b"endpoint-load-metrics", report.encode())]
            await send(message)

        await self._app(scope, receive, send_with_report)
