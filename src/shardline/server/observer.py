"""What sees every API request once: its latencies for Prometheus, where its time went, and its span."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardline.api.outputs import RequestOutput
from shardline.messages.timeline import ChoiceMetrics, RequestMetrics
from shardline.metrics.server import RequestHistograms
from shardline.sampling_params import SamplingParams
from shardline.server.request_metrics import metrics_body
from shardline.server.tracing import RequestTracer, trace_headers

if TYPE_CHECKING:
    from shardline.api.streams import RequestStream

MAX_REQUESTS = 1000
"""Finished requests that are kept."""
MAX_ENTRIES = 4_000
"""Choices, parts of prefills and preemptions of all finished requests that are kept: about 1 MB."""


class RequestObserver:
    """Observes the API requests of one server."""

    def __init__(self, histograms: RequestHistograms, tracer: RequestTracer | None = None) -> None:
        """`tracer`: None: no spans are sent."""
        self.histograms = histograms
        self.tracer = tracer
        self.log = RequestLog()

    def start(self, request_id: str, params: SamplingParams, max_model_len: int) -> ObservedRequest:
        """An API request has come. Its time starts with each of its prompts."""
        # A request may ask for any number of tokens, and no sum of such numbers says anything.
        most = params.max_tokens if params.max_tokens is None else min(params.max_tokens, max_model_len)
        return ObservedRequest(self, request_id, params.n, most)


class ObservedRequest:
    """One API request. `timers` has one for each of its prompts."""

    __slots__ = ("_choices", "_headers", "_max_tokens", "_observer", "_request_id", "timers")

    def __init__(self, observer: RequestObserver, request_id: str, choices: int, max_tokens: int | None) -> None:
        self._observer = observer
        self._request_id = request_id
        self._choices = choices
        self._max_tokens = max_tokens
        self._headers = trace_headers.get({})
        self.timers: list[RequestTimer] = []

    def add_prompt(self) -> None:
        """The next prompt is about to be admitted."""
        self.timers.append(RequestTimer(self._observer.histograms, self._choices, self._max_tokens))

    def admit(self, streams: Sequence[RequestStream]) -> None:
        """All prompts have been admitted; `streams` are theirs."""
        self._observer.log.begin(self._request_id, streams)

    def stop_timers(self) -> None:
        """Record the latencies of unfinished prompts, before they are aborted; may be called again."""
        timers, self.timers = self.timers, []
        for timer in timers:
            timer.finish()

    def end(self) -> None:
        """All prompts have ended. The request is logged, and its span is sent; may be called again."""
        metrics = self._observer.log.end(self._request_id)
        if metrics and self._observer.tracer is not None:
            self._observer.tracer.record(self._request_id, metrics, self._headers)


class RequestTimer:
    """Measures one request: a prompt with all its choices. Time starts when this object is constructed."""

    __slots__ = ("_choices", "_last", "_max_tokens", "_metrics", "_output", "_start", "_tokens")

    def __init__(self, metrics: RequestHistograms, choices: int, max_tokens: int | None = None) -> None:
        self._metrics = metrics
        self._choices = choices
        self._max_tokens = max_tokens
        self._start = time.perf_counter()
        self._last = self._start
        self._tokens = 0
        self._output: RequestOutput | None = None

    def observe_output(self, output: RequestOutput) -> None:
        """Record the arrival of an output. It runs for every output, so it must be cheap."""
        outputs = output.outputs
        tokens = len(outputs[0].token_ids) if len(outputs) == 1 else sum(len(choice.token_ids) for choice in outputs)
        if tokens > self._tokens:
            now = time.perf_counter()
            if self._tokens:
                self._metrics.inter_token.observe(now - self._last)
            else:
                self._metrics.first_token.observe(now - self._start)
            self._last = now
            self._tokens = tokens
        self._output = output

    def finish(self) -> None:
        """Record the whole request. Call this after its last output, also if the client has disconnected.

        It records once. A refused request has no output and is not recorded.
        """
        output, self._output = self._output, None
        if output is None:
            return
        self._metrics.end_to_end.observe(time.perf_counter() - self._start)
        self._metrics.prompt_tokens.observe(len(output.prompt_token_ids))
        self._metrics.generation_tokens.observe(self._tokens)
        self._metrics.choices.observe(self._choices)
        self._metrics.longest.observe(max(len(choice.token_ids) for choice in output.outputs))
        if self._max_tokens is not None:
            self._metrics.max_tokens.observe(self._max_tokens)
        if output.metrics is not None:
            for choice_metrics in output.metrics.choices:
                self._observe_choice(len(output.prompt_token_ids), choice_metrics)
        for choice in output.outputs:
            self._metrics.ended(choice.finish_reason or "abort").inc()

    def _observe_choice(self, num_prompt_tokens: int, choice: ChoiceMetrics) -> None:
        """Record where the time of a finished choice went."""
        metrics = self._metrics
        if choice.queued_seconds is not None:
            metrics.queue.observe(choice.queued_seconds)
        if choice.prefill_seconds is None or choice.decode_seconds is None:
            return
        metrics.prefill.observe(choice.prefill_seconds)
        metrics.decode.observe(choice.decode_seconds)
        metrics.inference.observe(choice.prefill_seconds + choice.decode_seconds)
        metrics.preemptions.observe(len(choice.preemptions))
        metrics.computed.observe(num_prompt_tokens - choice.num_cached_tokens)
        if choice.num_generation_tokens > 1:
            metrics.per_token.observe(choice.decode_seconds / (choice.num_generation_tokens - 1))


class RequestLog:
    """The API requests that run, and the last ones that have finished. It holds no text and no tokens."""

    def __init__(self, max_requests: int = MAX_REQUESTS, max_entries: int = MAX_ENTRIES) -> None:
        self._max_requests = max_requests
        self._max_entries = max_entries
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
            while len(self._finished) > self._max_requests or self._num_entries > self._max_entries:
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

    def last(self) -> dict[str, Any] | None:
        """Where the time of the request went that has ended last, without its id; None: none has."""
        return metrics_body(next(reversed(self._finished.values()))) if self._finished else None


def _num_entries(metrics: Sequence[RequestMetrics]) -> int:
    choices = [choice for request in metrics for choice in request.choices]
    return sum(1 + len(choice.prefill_chunks) + len(choice.preemptions) for choice in choices)
