"""Finds backends while the router runs: in a file, behind a DNS name, or in Kubernetes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from shardline.config.router import BackendSpec, RouterConfig, read_backends_file
from shardline.router.fleet import Fleet
from shardline.router.upstream import Answer, Upstream, UpstreamError

logger = logging.getLogger(__name__)

_SECONDS = 1.0
"""Between two looks at a file, and after a failure."""
_DNS_SECONDS = 5.0
_WATCH_SECONDS = 60
"""How long one watch of the Kubernetes API lasts."""
_ANSWER_BYTES = 16 << 20


class Discovery:
    """Keeps the fleet what the sources say. While a source cannot be read, its last word stands: health checks find
    backends that are gone."""

    def __init__(self, fleet: Fleet, config: RouterConfig) -> None:
        self._fleet = fleet
        self._config = config
        self._problems: dict[str, str] = {}
        """What was said last of each source that cannot be read."""

    async def run(self) -> None:
        """Follow all sources until the task is cancelled."""
        config, sources = self._config, []
        if config.backends_file is not None:
            sources.append(self._follow_file(config.backends_file))
        sources += [self._follow_name(url) for url in config.backend_dns]
        if config.kubernetes_service is not None:
            sources.append(self._follow_service(config.kubernetes_service))
        await asyncio.gather(*sources)

    async def _follow_file(self, name: str) -> None:
        read = seen = None
        while True:
            try:
                now = Path(name).stat()
                stamp = (now.st_mtime_ns, now.st_ino, now.st_size)
                if stamp != read and (stamp == seen or read is None):  # nobody is writing it
                    read = stamp
                    self._fleet.set_backends(name, read_backends_file(name))
                seen = stamp
            except (OSError, ValueError) as error:
                self._keep(name, error)
            await asyncio.sleep(_SECONDS)

    async def _follow_name(self, url: str) -> None:
        """Each address of the name is a backend."""
        parts = urlsplit(url)
        port = parts.port or 80
        loop = asyncio.get_running_loop()
        while True:
            try:
                found = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
                self._fleet.set_backends(url, [_spec(str(one[4][0]), port, parts.path) for one in found])
            except OSError as error:
                self._keep(url, error)
            await asyncio.sleep(_DNS_SECONDS)

    async def _follow_service(self, service: str) -> None:
        """The endpoints of a service: listed, and listed again at each event of a watch, and when the watch ends."""
        place, _, port = service.partition(":")
        namespace, _, name = place.rpartition("/")
        folder = Path(self._config.kubernetes_credentials)
        while True:
            try:
                certificates = folder / "ca.crt"
                api = Upstream(self._config.kubernetes_api, self._config.connect_timeout, str(certificates))
                namespace = namespace or (folder / "namespace").read_text(encoding="utf-8").strip()
                path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
                path += f"?labelSelector=kubernetes.io%2Fservice-name%3D{name}"
                with contextlib.closing(api):
                    await self._watch_service(api, folder / "token", path, service, port)
            except (OSError, ValueError, LookupError, TypeError, UpstreamError, msgspec.MsgspecError) as error:
                self._keep(service, error)
                await asyncio.sleep(_SECONDS)

    async def _watch_service(self, api: Upstream, token_file: Path, path: str, service: str, port: str) -> None:
        async def get(target: str) -> Answer:
            token = token_file.read_text(encoding="utf-8").strip()  # it is replaced from time to time
            headers = [(b"authorization", b"Bearer " + token.encode()), (b"accept", b"application/json")]
            answer = await api.send(b"GET", target.encode(), headers, b"", _WATCH_SECONDS)
            if answer.status != 200:
                answer.close()
                raise ValueError(f"the Kubernetes API says {answer.status} to GET {target}")
            return answer

        with contextlib.closing(await get(path)) as answer:
            slices = msgspec.json.decode(await answer.read_all(_WATCH_SECONDS, _ANSWER_BYTES))
        self._fleet.set_backends(service, endpoints(slices, port))
        self._problems.pop(service, None)
        version = slices["metadata"]["resourceVersion"]
        watch = f"{path}&watch=1&timeoutSeconds={_WATCH_SECONDS}&resourceVersion={version}"
        with contextlib.closing(await get(watch)) as answer:
            await answer.read(_WATCH_SECONDS + 10.0)  # the first event, or the end

    def _keep(self, source: str, error: Exception) -> None:
        if self._problems.get(source) != str(error):
            logger.warning("backends of %s stay as they are: %s", source, error)
        self._problems[source] = str(error)


def endpoints(slices: Any, port: str) -> list[BackendSpec]:
    """The endpoints of EndpointSlices that take new requests. `port`: its name or number; empty: the first one.

    Pods that are ready take requests; those that terminate take none, be they ready or not.

    Raises:
        LookupError, TypeError: these are no EndpointSlices.
    """
    found = []
    for one in slices["items"]:
        ports = [p for p in one.get("ports") or () if port in ("", p.get("name"), str(p.get("port")))]
        for endpoint in one.get("endpoints") or ():
            state = endpoint.get("conditions") or {}
            if ports and state.get("ready") is not False and not state.get("terminating"):
                found.append(_spec(endpoint["addresses"][0], ports[0]["port"], ""))
    return found


def _spec(address: str, port: int, path: str) -> BackendSpec:
    host = f"[{address}]" if ":" in address else address
    return BackendSpec(f"http://{host}:{port}{path}".rstrip("/"))
