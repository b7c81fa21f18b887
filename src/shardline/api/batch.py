"""Runs the requests of one batch on the replicas, and collects their outputs."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from shardline.api.engines import EngineEvent
from shardline.api.errors import EngineDead
from shardline.api.outputs import RequestOutput
from shardline.api.replicas import Replicas
from shardline.api.requests import PreparedRequest
from shardline.api.streams import RequestStream, Streams

T = TypeVar("T")
Events = queue.SimpleQueue[tuple[int, EngineEvent] | None]
"""The events of replicas, each with the replica's number; None: the engines were closed."""


@dataclass(frozen=True)
class RequestTimes:
    """Points in the life of one request, in seconds of time.monotonic()."""

    submitted: float
    """When a replica got the request."""
    first_token: float
    finished: float


def for_each(given: T | Sequence[T], count: int, name: str, *kinds: type) -> list[T]:
    """For each of `count` prompts, what is given for all or for each of them: objects of `kinds`.

    Raises:
        ValueError: it is given for another number of prompts, or is something else; the message calls it `name`.
    """
    each: list[Any] = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * count
    if wrong := [one for one in each if not isinstance(one, kinds)]:
        raise ValueError(f"{name}: give one {kinds[0].__name__} for all prompts or one for each, not {wrong[0]!r:.80}")
    if len(each) != count:
        raise ValueError(f"there are {count} prompts but {len(each)} {name}; give one for all, or one for each")
    return each


class BatchRunner:
    """Runs one batch at a time; one thread at a time may call it."""

    def __init__(self, replicas: Replicas, streams: Streams, events: Events) -> None:
        """`replicas` put their events into `events`. `streams`: those of `replicas`."""
        self._replicas = replicas
        self._streams = streams
        self._events = events
        self._window = 2 * replicas.config.max_running
        """Requests that a replica is given at once: as many as it runs, and as many that wait."""

    def run(
        self, requests: Sequence[PreparedRequest], on_finished: Callable[[RequestOutput], None]
    ) -> tuple[list[RequestOutput], list[RequestTimes]]:
        """Run a batch. Requests are submitted as earlier ones finish, so that the replicas stay evenly loaded.

        Raises:
            EngineDead: no replica is left, or the engines were closed.
        """
        pending = deque(requests)
        streams: list[RequestStream] = []
        first: dict[str, float] = {}
        finished: dict[str, float] = {}
        submitted: dict[str, float] = {}
        try:
            while pending or len(self._streams):
                while pending and self._has_room():
                    request = pending.popleft()
                    submitted[request.request_id] = time.monotonic()
                    streams.append(self._streams.open(request, bounded=False))
                for stream in self._next_updates():
                    now = time.monotonic()
                    first.setdefault(stream.request.request_id, now)
                    if stream.output.finished:
                        finished[stream.request.request_id] = now
                        on_finished(stream.output)
        except BaseException:
            self._streams.abort_all()
            raise
        if self._replicas.dead_reason and requests:
            raise EngineDead(self._replicas.dead_reason)
        outputs = [stream.output for stream in streams]
        ids = [output.request_id for output in outputs]
        return outputs, [RequestTimes(submitted[i], first[i], finished[i]) for i in ids]

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted and have not finished."""
        return len(self._streams)

    def _has_room(self) -> bool:
        """Whether the replicas should get one more request."""
        return self._replicas.num_in_flight() < self._window * max(1, sum(self._replicas.alive()))

    def _next_updates(self) -> list[RequestStream]:
        """Wait for the next event, and return the requests that it changed."""
        event = self._events.get()
        if event is None:
            raise EngineDead("this LLM was closed while it ran a batch")
        return self._streams.add_outputs(self._replicas.handle_event(*event))


MakeBar = Callable[..., Any]
"""Makes a progress bar; it is called as `tqdm.tqdm` is."""


class ProgressBar:
    """Shows finished requests and tokens per second on stderr, or where a given bar shows them."""

    def __init__(self, total: int, shown: bool | MakeBar) -> None:
        """`shown`: whether anything is shown, or what makes the bar."""
        self._start = time.monotonic()
        self._tokens_in = 0
        self._tokens_out = 0
        self._bar: Any = None
        if shown and total:
            from tqdm import tqdm

            make_bar = tqdm if shown is True else shown
            self._bar = make_bar(total=total, desc="Prompts", unit="prompt", dynamic_ncols=True, postfix=self._rates())

    def count_request(self, output: RequestOutput) -> None:
        """Count one finished request."""
        self._tokens_in += len(output.prompt_token_ids)
        self._tokens_out += sum(len(choice.token_ids) for choice in output.outputs)
        if self._bar is not None:
            self._bar.set_postfix_str(self._rates(), refresh=False)
            self._bar.update(1)

    def _rates(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        return f"in {self._tokens_in / seconds:.0f} tok/s, out {self._tokens_out / seconds:.0f} tok/s"

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
