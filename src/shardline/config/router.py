"""Configuration of the router. It is frozen and validated once; each field is a command-line flag."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shardline.config.fields import option, parse_bytes
from shardline.config.kv_events import check_endpoint, require_zmq


@dataclass(frozen=True)
class BackendSpec:
    """A backend as a file, a flag or a cluster names it."""

    url: str
    events: tuple[str, ...] = ()
    """Where its ranks publish KV events; empty: at its host, on --kv-events-port."""
    replays: tuple[str, ...] = ()
    """Where they send past events again, in the same order."""


@dataclass(frozen=True)
class RouterConfig:
    """What the router needs in addition to what a server has: address, keys, TLS and limits are ServerConfig's.

    Raises:
        ValueError: a value is out of range, or two values contradict each other.
    """

    backend: tuple[str, ...] = option((), "servers behind the router, for example http://10.0.0.1:8000")
    backends_file: str | None = option(
        None, "file with a backend's URL in each line, which may change while the router runs"
    )
    backend_dns: tuple[str, ...] = option(
        (), "servers behind a name with several addresses, for example http://headless:8000; each is a backend"
    )
    kubernetes_service: str | None = option(
        None, "NAMESPACE/SERVICE:PORT whose ready pods are backends, by the EndpointSlices of Kubernetes"
    )
    kubernetes_api: str = option("https://kubernetes.default.svc", "where the API of Kubernetes is")
    kubernetes_credentials: str = option(
        "/var/run/secrets/kubernetes.io/serviceaccount", "folder of token, ca.crt and namespace, as each pod has it"
    )
    policy: str = option(
        "least_work",
        "which backend takes a request, as --router-policy of a server; least_work: the one that has least to compute "
        "before the first token; kv_aware: the same by the KV events of backends (needs shardline[kv-events])",
    )
    kv_events_port: int = option(5557, "where backends publish KV events, for kv_aware")
    kv_replay_port: int = option(5558, "where they send past events again")
    kv_index_memory: str | int = option("256MiB", "memory for what the caches of backends hold; the oldest goes first")
    backend_api_key: str | None = option(None, "key for the backends; default: each client's own key is passed on")
    health_interval: float = option(1.0, "seconds between two looks at whether a backend is ready")
    connect_timeout: float = option(5.0, "seconds in which a backend must take a connection")
    answer_timeout: float = option(600.0, "seconds without a byte after which a backend's answer has failed")
    retries: int = option(2, "further backends that a request may try before its first token")
    max_backend_requests: int = option(256, "requests that a backend runs at once; further ones wait there")
    max_queue: int = option(256, "requests that wait here while all backends say that they are full; others get 429")
    queue_timeout: float = option(10.0, "seconds that a request waits here at most")

    def __post_init__(self) -> None:
        if isinstance(self.backend, str):
            raise ValueError("backend must be a sequence of URLs, not one string")
        for name in ("health_interval", "connect_timeout", "answer_timeout", "queue_timeout"):
            value = getattr(self, name)
            if not 0.0 < value < 1e6:
                raise ValueError(f"{name} must be seconds above 0, got {value}")
        parse_bytes(self.kv_index_memory)
        for name in ("kv_events_port", "kv_replay_port"):
            if not 0 < getattr(self, name) < 1 << 16:
                raise ValueError(f"{name} must be a port, got {getattr(self, name)}")
        if self.policy == "kv_aware":
            require_zmq("policy kv_aware")
        names = self.backend_dns
        if isinstance(names, str) or not all(check_backend_url(url).startswith("http:") for url in names):
            raise ValueError("backend_dns must be URLs like http://name:8000: certificates are not of addresses")
        if self.backends_file is not None:
            read_backends_file(self.backends_file)
        if self.kubernetes_service is not None:
            name, _, port = self.kubernetes_service.rpartition("/")[2].partition(":")
            if not name or (":" in self.kubernetes_service and not port):
                raise ValueError(f"kubernetes_service must be NAMESPACE/SERVICE:PORT, got {self.kubernetes_service!r}")
            check_backend_url(self.kubernetes_api)
        if not 0 <= self.retries <= 10:
            raise ValueError(f"retries must be in [0, 10], got {self.retries}")
        if not 0 <= self.max_queue <= 100_000:
            raise ValueError(f"max_queue must be in [0, 100000], got {self.max_queue}")
        if self.max_backend_requests < 1:
            raise ValueError(f"max_backend_requests must be at least 1, got {self.max_backend_requests}")
        urls = [check_backend_url(url) for url in self.backend]
        if twice := next((url for url in urls if urls.count(url) > 1), None):
            raise ValueError(f"backend: {twice} is given twice; each backend is given once")


def check_backend_url(url: str) -> str:
    """The URL of a backend in its one spelling: in small letters, without its scheme's own port and a slash at its end.

    Raises:
        ValueError: it is no URL of a server.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise ValueError(f"backend: {url!r} is no URL ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"backend: {url!r} is no URL of a server; write for example http://10.0.0.1:8000")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ValueError(f"backend: {url!r} must have scheme, host, port and path only; keys go to --backend-api-key")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    own_port = {"http": 80, "https": 443}[parts.scheme]
    place = host if port in (None, own_port) else f"{host}:{port}"
    return f"{parts.scheme}://{place}{parts.path}".rstrip("/")


def read_backends_file(name: str) -> list[BackendSpec]:
    """The backends of a file: in each line a URL, and if needed events=ADDRESSES and replay=ADDRESSES; # is a comment.

    Raises:
        ValueError: the file cannot be read, or a line is wrong.
    """
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"backends_file: cannot read {name}: {error}") from None
    specs: dict[str, BackendSpec] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            spec = _parse_backend(words)
        except ValueError as error:
            raise ValueError(f"backends_file {name}, line {number}: {error}") from None
        if spec.url in specs:
            raise ValueError(f"backends_file {name}, line {number}: {spec.url} is given twice")
        specs[spec.url] = spec
    return list(specs.values())


def _parse_backend(words: list[str]) -> BackendSpec:
    addresses: dict[str, tuple[str, ...]] = {"events": (), "replay": ()}
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name not in addresses:
            raise ValueError(f"{word!r} must be events=ADDRESS or replay=ADDRESS")
        addresses[name] = tuple(check_endpoint(name, one) for one in value.split(","))
    if addresses["replay"] and len(addresses["replay"]) != len(addresses["events"]):
        raise ValueError("replay must have as many addresses as events")
    return BackendSpec(check_backend_url(words[0]), addresses["events"], addresses["replay"])
