"""A span per API request under the caller's trace, sent to an OpenTelemetry collector. It needs the extra `otel`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shardline.messages.timeline import ChoiceMetrics, RequestMetrics

if TYPE_CHECKING:
    from opentelemetry.trace import Span

trace_headers: ContextVar[dict[str, str]] = ContextVar("trace_headers")
"""traceparent and tracestate of the HTTP request that is being answered."""


class TraceMiddleware:
    """Keeps the trace headers of a request for the handler."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            context = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
            trace_headers.set(context)
        await self._app(scope, receive, send)


class RequestTracer:
    """Sends spans in a thread of its own.

    Raises:
        ValueError: the extra `otel` is not installed.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ValueError(
                f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'shardline[otel]'"
            ) from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": "shardline"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("shardline")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def record(self, request_id: str, metrics: Sequence[RequestMetrics], headers: dict[str, str]) -> None:
        """Queue the span of a request that has ended."""
        arrival = min(prompt.arrival_time for prompt in metrics)
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(headers),
            start_time=_nanoseconds(arrival),
            attributes={
                "gen_ai.request.id": request_id,
                "gen_ai.response.model": self._model_name,
                "gen_ai.usage.completion_tokens": sum(
                    c.num_generation_tokens for prompt in metrics for c in prompt.choices
                ),
            },
        )
        for prompt in metrics:
            for choice in prompt.choices:
                _add_choice(span, prompt.arrival_time, choice)
        span.end(_nanoseconds(time.time()))

    def close(self) -> None:
        """Send what is queued."""
        self._provider.shutdown()


def _add_choice(span: Span, arrival: float, choice: ChoiceMetrics) -> None:
    """The events of one choice."""

    def event(name: str, at: float, **attributes: Any) -> None:
        span.add_event(name, {"choice": choice.index, **attributes}, _nanoseconds(arrival + at))

    values = {
        "gen_ai.latency.time_in_queue": choice.queued_seconds,
        "gen_ai.latency.time_to_first_token": choice.first_token_seconds,
        "gen_ai.latency.time_in_model_prefill": choice.prefill_seconds,
        "gen_ai.latency.time_in_model_decode": choice.decode_seconds,
    }
    if choice.index == 0:
        span.set_attributes({name: value for name, value in values.items() if value is not None})
    event("queued", 0.0)
    if choice.queued_seconds is not None:
        event("scheduled", choice.queued_seconds, num_cached_tokens=choice.num_cached_tokens)
    for chunk in choice.prefill_chunks:
        event("prefill_chunk", chunk.at, start=chunk.start, num_tokens=chunk.num_tokens, seconds=chunk.seconds)
    for preemption in choice.preemptions:
        event("preempted", preemption.at, num_lost_tokens=preemption.num_lost_tokens, seconds=preemption.seconds)
    if choice.first_token_seconds is not None:
        event("first_token", choice.first_token_seconds)
        last = choice.first_token_seconds + (choice.decode_seconds or 0.0)
        event("last_token", last, finish_reason=choice.finish_reason or "abort")


def _nanoseconds(seconds: float) -> int:
    return int(1e9 * seconds)
