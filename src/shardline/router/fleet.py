"""The backends: which are there, which can take a request, and which one gets it."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardline.config.fields import parse_bytes
from shardline.config.router import BackendSpec, RouterConfig, check_backend_url
from shardline.router.breaker import Breaker
from shardline.router.prompts import Prompt
from shardline.router.upstream import Upstream
from shardline.routing.kv_index import KVIndex
from shardline.routing.policies.base import ReplicaLoad
from shardline.routing.router import Decision, Router

logger = logging.getLogger(__name__)

_PACE_STEPS = 16
"""Of a stream, so that its pace counts."""


@dataclass(eq=False)
class Backend:
    """A server behind the router."""

    number: int
    url: str
    upstream: Upstream
    spec: BackendSpec
    source: str
    """What has named it: a file, a DNS name or a service; empty: a flag, or an administrator."""
    breaker: Breaker = field(default_factory=Breaker)
    is_ready: bool = False
    problem: str = "it has not been asked yet"
    """Why it is not ready."""
    num_looks: int = 0
    """How often it was looked at."""
    is_draining: bool = False
    """It gets no new requests."""
    models: tuple[str, ...] = ()
    """Names under which it serves; empty: not known yet."""
    model_entries: tuple[dict[str, Any], ...] = ()
    """What its /v1/models says of each."""
    contract: str = ""
    """The SHA-256 of its numeric contract: streams of backends with the same can go on here; empty: it states none."""
    busy_until: float = 0.0
    """It has refused a request for lack of room, and asked to be left alone until then, on the monotonic clock."""
    token_ways: list[bytes] = field(default_factory=lambda: [b"/render", b"/tokenize"])
    """What may tell the token ids of prompts there; the first is asked."""
    num_requests: int = 0
    num_bytes: int = 0
    """Of the prompts of these requests."""
    pending_chunks: int = 0
    """Chunks of the prompts of those that it has not begun to answer."""

    def status(self, now: float) -> dict[str, Any]:
        """What `shardline router status` shows."""
        return {
            "url": self.url,
            "state": self.state(now),
            "draining": self.is_draining,
            "problem": "" if self.is_ready else self.problem,
            "breaker": self.breaker.state(now),
            "requests": self.num_requests,
            "looks": self.num_looks,
            "models": list(self.models),
            "numeric_contract": self.contract,
        }

    def state(self, now: float) -> str:
        """ready, busy, failing (its breaker is open), draining or down."""
        if not self.is_ready:
            return "down"
        if self.is_draining:
            return "draining"
        if not self.breaker.allows(now):
            return "failing"
        return "busy" if now < self.busy_until else "ready"


class Fleet:
    """All backends. Its methods belong to one event loop."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises ValueError: there is no such policy."""
        self._config = config
        self._router = Router(config.policy, kv_bytes=parse_bytes(config.kv_index_memory))
        self.policy = config.policy
        self._num_added = 0
        self.backends: list[Backend] = []
        for url in config.backend:
            self.add(url)

    @property
    def kv(self) -> KVIndex:
        """What the caches of backends hold, for whoever hears of it."""
        return self._router.kv

    def add(self, url: str) -> Backend:
        """Add a backend; it gets requests once it is ready.

        Raises:
            ValueError: that is no URL of a server, or it is there already.
        """
        url = check_backend_url(url)
        if any(backend.url == url for backend in self.backends):
            raise ValueError(f"backend: {url} is there already")
        return self._add(BackendSpec(url), "")

    def set_backends(self, source: str, specs: Iterable[BackendSpec]) -> None:
        """Make the backends of a source those that it names now. Those that others have named stay theirs."""
        wanted = {spec.url: spec for spec in specs}
        for backend in [backend for backend in self.backends if backend.source == source]:
            if wanted.get(backend.url) != backend.spec:
                logger.info("backend %s is gone from %s", backend.url, source)
                self.remove(backend.url)
        known = {backend.url for backend in self.backends}
        for url, spec in wanted.items():
            if url not in known:
                logger.info("backend %s is found in %s", url, source)
                self._add(spec, source)

    def _add(self, spec: BackendSpec, source: str) -> Backend:
        upstream = Upstream(spec.url, self._config.connect_timeout)
        backend = Backend(self._num_added, spec.url, upstream, spec, source)
        self._num_added += 1
        self.backends.append(backend)
        return backend

    def find(self, url: str) -> Backend:
        """The backend with this URL.

        Raises:
            LookupError: there is none.
            ValueError: that is no URL of a server.
        """
        url = check_backend_url(url)
        for backend in self.backends:
            if backend.url == url:
                return backend
        known = ", ".join(backend.url for backend in self.backends) or "none"
        raise LookupError(f"there is no backend {url}; there are: {known}")

    def remove(self, url: str) -> None:
        """Forget a backend. Its requests go on to their ends.

        Raises:
            LookupError, ValueError: there is none.
        """
        backend = self.find(url)
        self.backends.remove(backend)
        self._router.forget_replica(backend.number)
        self._router.kv.forget(backend.number)
        backend.upstream.close()

    def close(self) -> None:
        """Close the connections that no request uses."""
        for backend in self.backends:
            backend.upstream.close()

    def note_health(self, backend: Backend, problem: str) -> None:
        """The outcome of a look at a backend; empty: it is ready."""
        is_ready = not problem
        backend.num_looks += 1
        if backend.is_ready and not is_ready:
            logger.warning("backend %s is not ready: %s", backend.url, problem)
            self._router.forget_replica(backend.number)  # what it has cached may be lost
        elif is_ready and not backend.is_ready:
            logger.info("backend %s is ready", backend.url)
        backend.is_ready, backend.problem = is_ready, problem

    def serves(self, model: str) -> bool:
        """Whether a backend may serve this model, be it down now, or not there yet."""
        return not (model and self.backends) or any(
            not backend.models or model in backend.models for backend in self.backends
        )

    def models(self) -> list[dict[str, Any]]:
        """What /v1/models of the backends say; a name that several have comes once."""
        entries: dict[str, dict[str, Any]] = {}
        for backend in self.backends:
            for entry in backend.model_entries:
                entries.setdefault(str(entry.get("id")), entry)
        return list(entries.values())

    def candidates(self, model: str, tried: Collection[Backend], only: Backend | None = None) -> list[Backend]:
        """The backends that can take a request for a model now; busy ones only if there is no other.

        `only`: the one that it must be.
        """
        now = time.monotonic()
        able = [
            backend
            for backend in (self.backends if only is None else [only])
            if backend not in tried
            and backend.is_ready
            and not backend.is_draining
            and backend.breaker.allows(now)
            and (only or not model or not backend.models or model in backend.models)
        ]
        return [backend for backend in able if backend.busy_until <= now] or able

    def reachable(self) -> list[Backend]:
        """The backends that can be asked for what they keep: also those that are full, or drain."""
        now = time.monotonic()
        return [backend for backend in self.backends if backend.state(now) not in ("down", "failing")]

    def busy_seconds(self, model: str, only: Backend | None = None) -> float:
        """How long all backends that can take a request are left alone; 0: there is none, or one that is not."""
        now = time.monotonic()
        return max(0.0, min((one.busy_until for one in self.candidates(model, (), only)), default=0.0) - now)

    def choose(self, prompt: Prompt, candidates: Sequence[Backend]) -> Choice:
        """The backend that takes a request, by the policy."""
        most = self._config.max_backend_requests
        loads = [
            ReplicaLoad(one.num_requests, one.num_bytes, one.number, most, pending_chunks=one.pending_chunks)
            for one in candidates
        ]
        is_adapter = prompt.token_ids is not None and any(
            entry["id"] == prompt.model and entry.get("parent")
            for backend in candidates
            for entry in backend.model_entries
        )
        decision = self._router.decide(
            prompt.text if prompt.token_ids is None else prompt.token_ids,
            prompt.salt,
            loads,
            session=prompt.session,
            model=prompt.model,
            adapter=prompt.model if is_adapter else "",
        )
        by_number = {backend.number: backend for backend in candidates}
        return Choice(by_number[decision.number], decision, by_number)

    def note_pace(self, choice: Choice, num_parts: int) -> None:
        """A stream has come to its end, in so many parts, which are about as many steps."""
        paces, number = self._router.paces, choice.backend.number
        if choice.ahead and num_parts:
            paces.add(number, 1, choice.ahead, choice.begun - choice.sent)
        if num_parts > _PACE_STEPS:
            paces.add(number, num_parts - 1, 0, time.monotonic() - choice.begun)

    def note_cached(self, choice: Choice, share: float) -> None:
        """A backend says which share of a prompt it had cached."""
        if not self._router.kv.follows(choice.backend.number):
            self._router.correct(choice.decision, share)


class Choice:
    """The backend that takes a request. Until it begins to answer, the prompt is work that it has before it."""

    def __init__(self, backend: Backend, decision: Decision, by_number: dict[int, Backend]) -> None:
        self.backend = backend
        self.decision = decision
        self._by_number = by_number
        self._pending = decision.cost
        self.ahead = decision.cost and decision.cost + backend.pending_chunks
        """Chunks that are computed before its first token; 0: it has none of its own."""
        backend.pending_chunks += self._pending
        self.sent, self.begun = time.monotonic(), 0.0

    def begin(self) -> None:
        """The answer begins, or none comes."""
        self.begun = self.begun or time.monotonic()
        self.backend.pending_chunks -= self._pending
        self._pending = 0

    def explain(self) -> str:
        """What was expected of each backend."""
        return self.decision.explain(lambda number: self._by_number[number].url)
