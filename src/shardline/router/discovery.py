"""Finds backends while the router runs: in a file, behind a DNS name, or in Kubernetes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from shardline.config.router import BackendSpec, RouterConfig, check_backend_url, read_backends_file
from shardline.router.fleet import Fleet
from shardline.router.upstream import Answer, Upstream, UpstreamError, find_addresses

logger = logging.getLogger(__name__)

_SECONDS = 1.0
"""Between two looks at a file, and after a failure."""
_DNS_SECONDS = 5.0
_WATCH_SECONDS = 60
"""How long one watch of the Kubernetes API lasts."""
_ANSWER_BYTES = 16 << 20
_KUBERNETES_ERRORS = (
    OSError, UpstreamError, ValueError, LookupError, TypeError, AttributeError, msgspec.MsgspecError,
)  # fmt: skip


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
        while True:
            try:
                found = await find_addresses(str(parts.hostname), port)
                self._fleet.set_backends(url, [_spec(str(address[0]), port, parts.path) for address in found])
            except OSError as error:
                self._keep(url, error)
            await asyncio.sleep(_DNS_SECONDS)

    async def _follow_service(self, service: str) -> None:
        """The endpoints of a service: listed once, then changed by the events of watches."""
        place, _, port = service.partition(":")
        namespace, _, name = place.rpartition("/")
        folder = Path(self._config.kubernetes_credentials)
        while True:
            try:
                certificates = folder / "ca.crt"
                # An error of TLS would not name the file.
                if self._config.kubernetes_api.startswith("https:") and not certificates.exists():
                    raise ValueError(f"there is no {certificates}: outside of a pod, set --kubernetes-credentials")
                api = Upstream(self._config.kubernetes_api, self._config.connect_timeout, str(certificates))
                namespace = namespace or (folder / "namespace").read_text(encoding="utf-8").strip()
                path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
                path += f"?labelSelector=kubernetes.io%2Fservice-name%3D{name}"
                with contextlib.closing(api):
                    await self._watch_service(_Slices(api, folder / "token", path), service, port)
            except _KUBERNETES_ERRORS as error:
                self._keep(service, error)
            await asyncio.sleep(_SECONDS)

    async def _watch_service(self, slices: _Slices, service: str, port: str) -> None:
        """Returns when all must be listed again. Raises what `_Slices` does."""

        def apply() -> None:
            self._fleet.set_backends(service, endpoints(slices.items.values(), port))
            self._problems.pop(service, None)

        await slices.read_all()
        apply()
        while await slices.watch(apply):
            pass

    def _keep(self, source: str, error: Exception) -> None:
        if self._problems.get(source) != str(error):
            logger.warning("backends of %s stay as they are: %s", source, error)
        self._problems[source] = str(error)


class _Slices:
    """The EndpointSlices of a service, as the Kubernetes API tells them: a list, and what has changed since then.

    Its methods raise OSError and UpstreamError where the API cannot be asked, and ValueError, LookupError, TypeError,
    AttributeError or msgspec's errors where it says what makes no sense.
    """

    def __init__(self, api: Upstream, token_file: Path, path: str) -> None:
        self.items: dict[str, Any] = {}
        """By their names."""
        self._api = api
        self._token_file = token_file
        self._path = path
        self._version = ""

    async def read_all(self) -> None:
        """List them."""
        with contextlib.closing(await self._get(self._path)) as answer:
            said = msgspec.json.decode(await answer.read_all(_WATCH_SECONDS, _ANSWER_BYTES))
        self.items = {item["metadata"]["name"]: item for item in said["items"]}
        self._version = said["metadata"]["resourceVersion"]

    async def watch(self, apply: Callable[[], None]) -> bool:
        """Follow what changes until the watch ends, and call `apply` after each change. Another watch goes on there.

        False: the API no longer knows what has changed (410 Gone), so all must be listed again.
        """
        before, rest = self._version, b""
        query = f"&watch=1&allowWatchBookmarks=true&timeoutSeconds={_WATCH_SECONDS}&resourceVersion={before}"
        with contextlib.closing(await self._get(self._path + query, HTTPStatus.GONE)) as answer:
            if answer.status == HTTPStatus.GONE:
                return False
            while data := await answer.read(_WATCH_SECONDS + 10.0):
                *lines, rest = (rest + data).split(b"\n")
                if not all(map(self._note, filter(None, lines))):
                    return False
                if len(rest) > _ANSWER_BYTES:
                    raise ValueError(f"an event of the Kubernetes API is larger than {_ANSWER_BYTES} bytes")
                apply()
        if self._version == before:
            await asyncio.sleep(_SECONDS)  # a server that ends each watch at once is not asked all the time
        return True

    def _note(self, line: bytes) -> bool:
        """Whether an event says what has changed."""
        event = msgspec.json.decode(line)
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            if item["code"] == HTTPStatus.GONE:
                return False
            raise ValueError(f"the Kubernetes API says {item['code']}: {item.get('message')}")
        self._version = item["metadata"]["resourceVersion"]
        if kind == "DELETED":
            self.items.pop(item["metadata"]["name"], None)
        elif kind != "BOOKMARK":
            self.items[item["metadata"]["name"]] = item
        return True

    async def _get(self, target: str, *others: int) -> Answer:
        """An answer with status 200, or one of `others`."""
        token = self._token_file.read_text(encoding="utf-8").strip()  # it is replaced from time to time
        headers = [(b"authorization", b"Bearer " + token.encode()), (b"accept", b"application/json")]
        answer = await self._api.send(b"GET", target.encode(), headers, b"", _WATCH_SECONDS)
        if answer.status not in (200, *others):
            answer.close()
            raise ValueError(f"the Kubernetes API says {answer.status} to GET {target}")
        return answer


def endpoints(slices: Iterable[Any], port: str) -> list[BackendSpec]:
    """The endpoints of EndpointSlices that take new requests. `port`: its name or number; empty: the first one.

    Pods that are ready take requests; those that terminate take none, be they ready or not.

    Raises:
        LookupError, TypeError, AttributeError, ValueError: these are no EndpointSlices.
    """
    found = []
    for one in slices:
        ports = [p for p in one.get("ports") or () if port in ("", p.get("name"), str(p.get("port")))]
        for endpoint in one.get("endpoints") or ():
            state = endpoint.get("conditions") or {}
            if ports and state.get("ready") is not False and not state.get("terminating"):
                found.append(_spec(endpoint["addresses"][0], ports[0]["port"], ""))
    return found


def _spec(address: str, port: int, path: str) -> BackendSpec:
    host = f"[{address}]" if ":" in address else address
    return BackendSpec(check_backend_url(f"http://{host}:{port}{path}"))
