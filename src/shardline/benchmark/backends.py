"""The APIs that a benchmark can call: how each request is written, and how its answer is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from shardline.benchmark.http_client import HttpClient
from shardline.benchmark.workload import Record, Sample

_ERROR_CHARS = 300


@dataclass(frozen=True)
class Backend:
    """An API.

    `suffix` ends the path of its endpoint; `write_body` makes a request's body from the model's name and the sample.
    """

    name: str
    endpoint: str
    suffix: str
    write_body: Callable[[str, Sample, int | None], dict[str, Any]]
    streams: bool = True
    """Whether the answer is a stream of events with tokens."""

    def check_endpoint(self, endpoint: str) -> None:
        """Raises:
        ValueError: the endpoint belongs to another API.
        """
        if not endpoint.rstrip("/").endswith(self.suffix):
            raise ValueError(f"--backend {self.name} needs an --endpoint that ends with {self.suffix}, got {endpoint}")


def _completion(model: str, sample: Sample, logprobs: int | None) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": sample.prompt,
        "repetition_penalty": 1.0,
        "max_tokens": sample.output_len,
        "logprobs": logprobs,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _chat(model: str, sample: Sample, logprobs: int | None) -> dict[str, Any]:
    if not isinstance(sample.prompt, str):
        raise ValueError("--backend openai-chat needs prompts that are text; use --backend openai for token ids")
    return {
        "model": model,
        "messages": [{"role": "user", "content": sample.prompt}],
        "max_completion_tokens": sample.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}),
    }


def _embedding(model: str, sample: Sample, logprobs: int | None) -> dict[str, Any]:
    return {"model": model, "input": sample.prompt}


BACKENDS = {
    one.name: one
    for one in (
        Backend("openai", "/v1/completions", "completions", _completion),
        Backend("vllm", "/v1/completions", "completions", _completion),
        Backend("openai-chat", "/v1/chat/completions", "chat/completions", _chat),
        Backend("openai-embeddings", "/v1/embeddings", "embeddings", _embedding, streams=False),
    )
}


_NOTHING = (b"", b"null", b"[]")
"""JSON of a field that is missing or empty."""


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()

    @property
    def only_role(self) -> bool:
        """Whether it is a stream's first event, which some servers send before there is any output."""
        output = self.content or self.reasoning or self.reasoning_content
        return bool(self.role) and not output and bytes(self.tool_calls) in _NOTHING


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    """One event of a stream, or the answer of an embedding."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class RequestWriter:
    """Writes requests to one endpoint of one server."""

    def __init__(
        self,
        client: HttpClient,
        backend: Backend,
        endpoint: str,
        model: str,
        *,
        headers: dict[str, str],
        extra_body: dict[str, Any],
        logprobs: int | None = None,
    ) -> None:
        self._backend = backend
        self._model = model
        self._extra_body = extra_body
        self._logprobs = logprobs
        self._head = client.head("POST", endpoint, {"Content-Type": "application/json", **headers})

    def write(self, sample: Sample, request_id: str, model: str | None = None) -> bytes:
        """The bytes of one request. `model`: another one than the usual."""
        body = self._backend.write_body(model or self._model, sample, self._logprobs)
        data = msgspec.json.encode({**body, **self._extra_body})
        return b"%bx-request-id: %b\r\nContent-Length: %d\r\n\r\n%b" % (
            self._head,
            request_id.encode("latin-1"),
            len(data),
            data,
        )


class StreamExchange(ABC):
    """An exchange that hears the events of a stream, or a whole answer, and what failed."""

    def __init__(self, request: bytes, *, streams: bool = True) -> None:
        self.request = request
        self._streams = streams
        self._status, self._reason = 0, ""
        self._rest = b""

    @abstractmethod
    def on_sent(self, now: float) -> None:
        """See Exchange; a request may be sent again, over a new connection."""

    @abstractmethod
    def read_payload(self, payload: bytes, now: float) -> None:
        """The data of one event."""

    @abstractmethod
    def read_whole(self, body: bytes, now: float) -> None:
        """The body of an answer that is no stream."""

    @abstractmethod
    def end(self) -> None:
        """Nothing more will come."""

    @abstractmethod
    def set_failure(self, cause: str, detail: str) -> None:
        """Something failed; see Record."""

    def on_status(self, status: int, reason: str) -> None:
        self._status, self._reason = status, reason

    def on_body(self, data: bytes, now: float) -> None:
        if self._status != 200 or not self._streams:
            self._rest += data
            return
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            self._read_event(event, now)

    def on_end(self, now: float) -> None:
        if self._status != 200:
            body = " ".join(self._rest[:_ERROR_CHARS].decode(errors="replace").split())
            self.set_failure(f"HTTP {self._status}", body or f"HTTP {self._status} {self._reason}".rstrip())
        elif not self._streams:
            self.read_whole(self._rest, now)
        elif self._rest.strip():
            self._read_event(self._rest.strip(), now)
        self.end()

    def on_failure(self, cause: str, detail: str, now: float) -> None:
        self.set_failure(cause, detail)
        self.end()

    def _read_event(self, event: bytes, now: float) -> None:
        if not event.startswith(b"data:"):
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if not lines:
                return  # a comment, or an event without data
            payload = b"\n".join(lines)
        else:
            payload = event[5:].strip()
        if payload != b"[DONE]":
            self.read_payload(payload, now)


class RecordingExchange(StreamExchange):
    """An exchange that fills in a Record, and calls `on_done` when it has ended.

    An event with choices is a piece of output, even if its text is empty: a special token has no text. An event
    without choices may have the usage.
    """

    def __init__(self, request: bytes, record: Record, on_done: Callable[[Record], None], *, streams: bool) -> None:
        super().__init__(request, streams=streams)
        self._record = record
        self._on_done = on_done
        self._decode = msgspec.json.Decoder(_Event).decode

    def on_sent(self, now: float) -> None:
        if not self._record.sent:
            self._record.sent = now

    def end(self) -> None:
        if self._streams and not self._record.token_times and self._record.succeeded:
            self.set_failure("no output", "the stream ended without a token")
        self._on_done(self._record)

    def read_payload(self, payload: bytes, now: float) -> None:
        try:
            found = self._decode(payload)
        except msgspec.MsgspecError as error:
            self.set_failure("malformed event", f"{error}: {payload[:_ERROR_CHARS].decode(errors='replace')}")
            return
        record = self._record
        if bytes(found.error) not in _NOTHING:
            self.set_failure("error in the stream", bytes(found.error)[:_ERROR_CHARS].decode(errors="replace"))
        elif found.choices:
            choice = found.choices[0]
            if choice.delta is not None and choice.delta.only_role and choice.finish_reason is None:
                return
            record.token_times.append(now)
            record.end = now
            text = choice.text if choice.delta is None else choice.delta.content
            if text:
                record.texts.append(text)
        elif found.usage is not None:
            self._take_usage(found.usage)

    def read_whole(self, body: bytes, now: float) -> None:
        self._record.end = now
        try:
            found = self._decode(body)
        except msgspec.MsgspecError as error:
            self.set_failure("malformed answer", str(error))
            return
        if found.usage is not None:
            self._take_usage(found.usage)

    def _take_usage(self, usage: _Usage) -> None:
        if usage.completion_tokens is not None:
            self._record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens is not None:
            self._record.prompt_len = usage.prompt_tokens

    def set_failure(self, cause: str, detail: str) -> None:
        if not self._record.cause:
            self._record.cause, self._record.error = cause, detail or cause
