"""Spans of requests, at a collector of our own."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from shardline.config.server import ServerConfig
from tests.server.conftest import serve
from tests.server.test_observer import TIMELINE


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """The endpoint of a collector, and the spans that it gets."""
    spans: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            request = ExportTraceServiceRequest.FromString(body)
            spans.extend(s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_span_per_request_under_the_callers_trace(collector: tuple[str, list[Any]]) -> None:
    endpoint, spans = collector
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with serve(ServerConfig(otlp_traces_endpoint=endpoint)) as running, running.http() as client:
        running.engine.timeline = TIMELINE
        headers = {"traceparent": f"00-{trace}-{parent}-01"}
        body = {"prompt": "Hi", "max_tokens": 3}
        answer = client.post("/v1/completions", json=body, headers=headers).json()
        assert client.post("/v1/completions", json=body).status_code == 200
        assert running.service.observer.tracer is not None
        running.service.observer.tracer.close()
    mine, other = spans
    assert (mine.trace_id.hex(), mine.parent_span_id.hex()) == (trace, parent)
    assert (other.trace_id.hex() != trace, other.parent_span_id) == (True, b"")
    attributes = {one.key: one.value for one in mine.attributes}
    assert attributes["gen_ai.request.id"].string_value == answer["id"]
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 3
    assert attributes["gen_ai.latency.time_in_queue"].double_value == pytest.approx(0.012)
    names = [event.name for event in mine.events]
    assert names == ["queued", "scheduled", "prefill_chunk", "prefill_chunk", "preempted", "first_token", "last_token"]
    times = {event.name: event.time_unix_nano for event in mine.events}
    assert times["scheduled"] - times["queued"] == pytest.approx(12e6, abs=1e5)
    assert mine.start_time_unix_nano == pytest.approx(times["queued"], abs=1e3)
    assert mine.end_time_unix_nano >= times["last_token"]
