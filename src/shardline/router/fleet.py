"""The backends: which are there, which can take a request, and which one gets it."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardline.config.router import RouterConfig, check_backend_url
from shardline.router.breaker import Breaker
from shardline.router.upstream import Upstream
from shardline.routing.policies.base import ReplicaLoad
from shardline.routing.router import Router

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Backend:
    """A server behind the router."""

    number: int
    url: str
    upstream: Upstream
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
    num_requests: int = 0
    num_bytes: int = 0
    """Of the prompts of these requests."""

    def status(self, now: float) -> dict[str, Any]:
        """What `shardline router status` shows."""
        return {
            "url": self.url,
            "state": self.state(now),
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
        self._router = Router(config.policy)
        self.policy = config.policy
        self._num_added = 0
        self.backends: list[Backend] = []
        for url in config.backend:
            self.add(url)

    def add(self, url: str) -> Backend:
        """Add a backend; it gets requests once it is ready.

        Raises:
            ValueError: that is no URL of a server, or it is there already.
        """
        url = check_backend_url(url)
        if any(backend.url == url for backend in self.backends):
            raise ValueError(f"backend: {url} is there already")
        backend = Backend(self._num_added, url, Upstream(url, self._config.connect_timeout))
        self._num_added += 1
        self.backends.append(backend)
        return backend

    def find(self, url: str) -> Backend:
        """The backend with this URL.

        Raises:
            LookupError: there is none.
        """
        for backend in self.backends:
            if backend.url == url.rstrip("/"):
                return backend
        known = ", ".join(backend.url for backend in self.backends) or "none"
        raise LookupError(f"there is no backend {url}; there are: {known}")

    def remove(self, url: str) -> None:
        """Forget a backend. Its requests go on to their ends.

        Raises:
            LookupError: there is none.
        """
        backend = self.find(url)
        self.backends.remove(backend)
        self._router.forget_replica(backend.number)
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

    def candidates(self, model: str, tried: Collection[Backend]) -> list[Backend]:
        """The backends that can take a request for a model now; busy ones only if there is no other."""
        now = time.monotonic()
        able = [
            backend
            for backend in self.backends
            if backend not in tried
            and backend.is_ready
            and not backend.is_draining
            and backend.breaker.allows(now)
            and (not model or not backend.models or model in backend.models)
        ]
        return [backend for backend in able if backend.busy_until <= now] or able

    def choose(self, prompt: bytes, namespace: str, candidates: Sequence[Backend]) -> Backend:
        """The backend that takes a request, by the policy. Equal prompts in different namespaces share nothing."""
        loads = [
            ReplicaLoad(backend.num_requests, backend.num_bytes, backend.number, self._config.max_backend_requests)
            for backend in candidates
        ]
        number = self._router.choose(prompt, namespace, loads)
        return next(backend for backend in candidates if backend.number == number)
