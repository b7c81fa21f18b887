"""Samples for all who look at a server: one look a second, written once, and sent to every viewer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shardline import __version__
from shardline.messages.worker import RankReport
from shardline.server.errors import ApiError
from shardline.server.sse import CUT, STREAM_HEADERS, make_event
from shardline.server.window import Cluster, HostView, RankView, ReplicaView
from shardline.server.window.imbalance import EngineLoad, RankLoad, find_imbalances
from shardline.server.window.sampling import SAMPLE_SECONDS, Sampler, Share

if TYPE_CHECKING:
    from shardline.api.async_llm import AsyncLLM
    from shardline.metrics.histogram import FastHistogram
    from shardline.server.observer import RequestLog

MAX_VIEWERS = 32
"""Streams at once; others are asked to come back."""
STUCK_SECONDS = 30.0
"""A viewer whose connection takes nothing for so long loses it."""


class Window:
    """The view of one server. Its methods belong to one event loop."""

    def __init__(self, llm: AsyncLLM, model_name: str, first_token: FastHistogram, log: RequestLog) -> None:
        self._llm = llm
        self._model_name = model_name
        self._log = log
        self._sampler = Sampler(llm.stats, first_token)
        self._started = time.monotonic()
        self.num_samples = 0
        self._num_viewers = 0
        self._tick = asyncio.Event()
        """Set by the next sample, and replaced by a new one."""
        self._bodies: dict[bool, bytes] = {}
        """What has been written of the last sample, with and without its history."""
        self._is_closed = False

    async def run(self) -> None:
        """Sample until the task is cancelled; then all streams end."""
        try:
            while True:
                await asyncio.sleep(SAMPLE_SECONDS)
                self.sample()
        finally:
            self._is_closed = True
            self._tick.set()

    def sample(self) -> None:
        """Take a sample, and wake the viewers."""
        self._sampler.take()
        self.num_samples += 1
        self._bodies.clear()
        tick, self._tick = self._tick, asyncio.Event()
        tick.set()

    def body(self, *, history: bool) -> bytes:
        """The answer now, as JSON."""
        if self._sampler.age > 2 * SAMPLE_SECONDS:
            self.sample()
        if history not in self._bodies:
            self._bodies[history] = msgspec.json.encode(self._look(history=history))
        return self._bodies[history]

    async def wait_sample(self, num_seen: int) -> bool:
        """Wait until there are more samples than these. False: none follows."""
        while self.num_samples == num_seen and not self._is_closed:
            await self._tick.wait()
        return not self._is_closed

    @contextlib.contextmanager
    def viewing(self) -> Iterator[None]:
        """Around a stream of events.

        Raises:
            ApiError: 429, too many look already.
        """
        if self._num_viewers >= MAX_VIEWERS:
            error = ApiError(429, f"{MAX_VIEWERS} streams of /cluster are open already; try again later.")
            error.headers = {"Retry-After": "10"}
            raise error
        self._num_viewers += 1
        try:
            yield
        finally:
            self._num_viewers -= 1

    def _look(self, *, history: bool) -> Cluster:
        llm, sampler = self._llm, self._sampler
        parallel, stats, alive = llm.config.parallel, sampler.stats, llm.replicas_alive()
        reports = llm.ranks()
        hosts = self._hosts()
        loads: list[EngineLoad] = []
        replicas: list[ReplicaView] = []
        for index, one in enumerate(stats):
            engine, in_lockstep = divmod(index, parallel.lockstep)
            ranks: list[RankView] = []
            if not in_lockstep and engine < len(reports):
                shares = sampler.shares(index) or [Share(0.0, 0.0, None)] * len(reports[engine])
                ranks = self._ranks(engine, reports[engine], shares)
                loads.append(self._load(engine, ranks, hosts))
            replicas.append(ReplicaView(index, alive[engine], sampler.rates(index), one.kv_blocks_total, ranks))
        return Cluster(
            time=round(time.time(), 1),
            model=self._model_name,
            version=__version__,
            state=llm.state(),
            uptime_seconds=round(time.monotonic() - self._started, 1),
            router_policy=parallel.router_policy,
            rates=sampler.rates(),
            first_token=sampler.first_token(),
            hosts=hosts,
            replicas=replicas,
            notices=find_imbalances(loads, parallel.router_policy),
            last_request=self._log.last(),
            history=sampler.history() if history else None,
        )

    def _hosts(self) -> list[HostView]:
        deployment = self._llm.deployment
        if deployment is None:
            return []
        return [
            HostView(
                host.name,
                host.address,
                host.cores,
                max((host.devices[index].memory_total for index in host.of_kind("cpu")), default=0),
                [host.devices[index].name for index in host.of_kind("cuda")],
            )
            for host in deployment.machine.hosts
        ]

    def _ranks(self, engine: int, reports: Sequence[RankReport], shares: Sequence[Share]) -> list[RankView]:
        deployment = self._llm.deployment
        if deployment is None:
            return []
        views = []
        for report, share in zip(reports, shares, strict=True):
            place = deployment.grid.place(report.rank)
            stage = deployment.stages[place.pp_rank]
            views.append(
                RankView(
                    rank=report.rank,
                    host=deployment.placements[engine][report.rank].host,
                    device=report.device,
                    pid=report.pid,
                    threads=report.threads,
                    dp=place.dp_rank,
                    pp=place.pp_rank,
                    tp=place.tp_rank,
                    cp=place.cp_rank,
                    layers=[stage.start, stage.stop - 1],
                    weight_bytes=report.weight_bytes,
                    kv_bytes=report.kv_bytes,
                    busy=share.busy,
                    waiting=share.waiting,
                    step_seconds=share.step_seconds,
                )
            )
        return views

    def _load(self, engine: int, ranks: Sequence[RankView], hosts: Sequence[HostView]) -> EngineLoad:
        deployment, lockstep = self._llm.deployment, self._llm.config.parallel.lockstep
        own = self._sampler.stats[engine * lockstep : (engine + 1) * lockstep]
        experts = own[0].experts
        return EngineLoad(
            engine,
            [RankLoad(rank.rank, rank.pp, hosts[rank.host].name, rank.busy, rank.waiting) for rank in ranks],
            sum(stats.num_running for stats in own),
            [stage.size for stage in deployment.stages] if deployment is not None else [],
            experts.rank_imbalance if experts is not None else 1.0,
            deployment is not None and deployment.expert_parallel,
        )


class ClusterStream(Response):
    """The view as server-sent events: at first with its history, then each second without.

    A viewer that reads slowly gets fewer events, and nothing piles up for it here.
    """

    media_type = "text/event-stream"

    def __init__(self, window: Window) -> None:
        super().__init__(headers=STREAM_HEADERS)
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._window = window

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client leaves or the server ends.

        Raises:
            ApiError: too many look already.
        """
        with self._window.viewing():
            sending = asyncio.create_task(self._send_events(send))
            leaving = asyncio.create_task(_wait_left(receive))
            try:
                await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    await sending
            except TimeoutError:
                scope[CUT]()
                await leaving
            finally:
                for task in (sending, leaving):
                    task.cancel()
                await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        window, is_first, goes_on = self._window, True, True
        while goes_on:
            body, num_seen = make_event(window.body(history=is_first)), window.num_samples
            message = {"type": "http.response.body", "body": body, "more_body": True}
            async with asyncio.timeout(STUCK_SECONDS):
                await send(message)
            is_first, goes_on = False, await window.wait_sample(num_seen)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _wait_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
