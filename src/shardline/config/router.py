"""Configuration of the router. It is frozen and validated once; each field is a command-line flag."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from shardline.config.fields import option


@dataclass(frozen=True)
class RouterConfig:
    """What the router needs in addition to what a server has: address, keys, TLS and limits are ServerConfig's.

    Raises:
        ValueError: a value is out of range, or two values contradict each other.
    """

    backend: tuple[str, ...] = option((), "servers behind the router, for example http://10.0.0.1:8000")
    policy: str = option(
        "least_work",
        "which backend takes a request, as --router-policy of a server; least_work: the one that has least to compute "
        "before the first token",
    )
    backend_api_key: str | None = option(None, "key for the backends; default: each client's own key is passed on")
    health_interval: float = option(1.0, "seconds between two looks at whether a backend is ready")
    connect_timeout: float = option(5.0, "seconds in which a backend must take a connection")
    answer_timeout: float = option(600.0, "seconds without a byte after which a backend's answer has failed")
    retries: int = option(2, "further backends that a request may try before its first token")
    max_backend_requests: int = option(256, "requests that a backend runs at once; further ones wait there")

    def __post_init__(self) -> None:
        if isinstance(self.backend, str):
            raise ValueError("backend must be a sequence of URLs, not one string")
        for name in ("health_interval", "connect_timeout", "answer_timeout"):
            value = getattr(self, name)
            if not 0.0 < value < 1e6:
                raise ValueError(f"{name} must be seconds above 0, got {value}")
        if not 0 <= self.retries <= 10:
            raise ValueError(f"retries must be in [0, 10], got {self.retries}")
        if self.max_backend_requests < 1:
            raise ValueError(f"max_backend_requests must be at least 1, got {self.max_backend_requests}")
        urls = [check_backend_url(url) for url in self.backend]
        if twice := next((url for url in urls if urls.count(url) > 1), None):
            raise ValueError(f"backend: {twice} is given twice; each backend is given once")


def check_backend_url(url: str) -> str:
    """The URL of a backend without a slash at its end.

    Raises:
        ValueError: it is no URL of a server.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"backend: {url!r} is no URL ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"backend: {url!r} is no URL of a server; write for example http://10.0.0.1:8000")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ValueError(f"backend: {url!r} must have scheme, host, port and path only; keys go to --backend-api-key")
    return url.rstrip("/")
