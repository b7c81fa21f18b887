"""Where the time of each request went, as JSON: for answers with `return_metrics`, and GET /requests/{id}."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from shardline.messages.timeline import ChoiceMetrics, RequestMetrics

if TYPE_CHECKING:
    from shardline.api.outputs import RequestOutput
    from shardline.api.streams import RequestStream

MOST_REQUESTS = 1000
"""Finished requests that are kept."""
MOST_ENTRIES = 4_000
"""Choices, parts of prefills and preemptions of all finished requests that are kept: about 1 MB."""


def metrics_body(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """The metrics of the prompts of one API request as a JSON object. Choices are numbered over all prompts."""
    choices = [choice for one in metrics for choice in one.choices]
    return {
        "arrival_time": min(one.arrival_time for one in metrics),
        "choices": [_choice_body(index, choice) for index, choice in enumerate(choices)],
    }


def answer_metrics(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The metrics of a finished answer."""
    return metrics_body([output.metrics for output in outputs if output.metrics is not None])


def summary_line(choice: ChoiceMetrics) -> str:
    """A choice's time in one line for people."""
    cached = f", {choice.num_cached_tokens} tokens cached" if choice.num_cached_tokens else ""
    parts = [
        _phase("queued", choice.queued_seconds),
        _phase("prefill", choice.prefill_seconds, f"{len(choice.prefill_chunks)} chunk(s){cached}"),
        _phase("first token after", choice.first_token_seconds),
        _phase("decode", choice.decode_seconds, f"{choice.num_generation_tokens} tokens"),
    ]
    if choice.preemptions:
        parts.append(_phase(f"{len(choice.preemptions)} preemption(s)", choice.preempted_seconds))
    return ", ".join(filter(None, parts)) or "queued"


def _phase(name: str, seconds: float | None, remark: str = "") -> str:
    if seconds is None:
        return ""
    return f"{name} {1e3 * seconds:.0f} ms" + (f" ({remark})" if remark else "")


def _choice_body(index: int, choice: ChoiceMetrics) -> dict[str, Any]:
    body = msgspec.structs.asdict(choice)
    body["index"] = index
    for name in ("prefill_chunks", "preemptions"):
        body[name] = [msgspec.structs.asdict(entry) for entry in body[name]]
    body["preempted_seconds"] = choice.preempted_seconds
    body["summary"] = summary_line(choice)
    return body


def _num_entries(metrics: Sequence[RequestMetrics]) -> int:
    choices = [choice for request in metrics for choice in request.choices]
    return sum(1 + len(choice.prefill_chunks) + len(choice.preemptions) for choice in choices)


class RequestLog:
    """The API requests that run, and the last ones that have finished. It holds no text and no tokens."""

    def __init__(self, most_requests: int = MOST_REQUESTS, most_entries: int = MOST_ENTRIES) -> None:
        self._most_requests = most_requests
        self._most_entries = most_entries
        self._num_entries = 0
        self._running: dict[str, Sequence[RequestStream]] = {}
        self._finished: OrderedDict[str, Sequence[RequestMetrics]] = OrderedDict()

    def begin(self, request_id: str, streams: Sequence[RequestStream]) -> None:
        """Note an admitted API request; `streams` are its prompts."""
        self._running[request_id] = streams

    def end(self, request_id: str) -> Sequence[RequestMetrics]:
        """Note that it has ended; returns the metrics of its prompts. They are empty if it was not admitted."""
        streams = self._running.pop(request_id, ())
        metrics = [stream.metrics() for stream in streams]
        if metrics:
            self._finished[request_id] = metrics
            self._num_entries += _num_entries(metrics)
            while len(self._finished) > self._most_requests or self._num_entries > self._most_entries:
                self._num_entries -= _num_entries(self._finished.popitem(last=False)[1])
        return metrics

    def find(self, request_id: str) -> dict[str, Any] | None:
        """What is known of a request; None: nothing."""
        if request_id in self._running:
            metrics: Sequence[RequestMetrics] = [stream.metrics() for stream in self._running[request_id]]
            status = "running"
        elif request_id in self._finished:
            metrics, status = self._finished[request_id], "finished"
        else:
            return None
        return {"id": request_id, "status": status, **metrics_body(metrics)}
