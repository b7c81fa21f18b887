"""What the user asked for with `--kv-events-config`: vLLM's JSON."""

from __future__ import annotations

import dataclasses
import importlib.util
import ipaddress
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_EXAMPLE = '{"enable_kv_cache_events": true, "replay_endpoint": "tcp://127.0.0.1:5558"}'


@dataclass(frozen=True)
class KVEventsConfig:
    """Where an engine publishes what its KV cache holds. Replica n uses the ports n above these.

    Raises:
        ValueError: a value is out of range.
    """

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    """zmq; null publishes nothing."""
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str = ""
    """Where past batches are sent again; it is always bound. Empty: nowhere."""
    buffer_steps: int = 10_000
    """Batches that can be sent again."""
    hwm: int = 100_000
    """Batches that wait for one slow subscriber; further ones are lost to it."""
    max_queue_size: int = 100_000
    """Without effect: there is no other queue."""
    topic: str = ""

    def __post_init__(self) -> None:
        if self.publisher not in ("zmq", "null"):
            raise ValueError(f"publisher of kv_events_config must be zmq or null, got {self.publisher!r}")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < 1 << 31:
                raise ValueError(f"{name} of kv_events_config must be a whole number from 0 on, got {value!r}")
        for name in ("endpoint", "replay_endpoint"):
            if (value := getattr(self, name)) != "":
                check_endpoint(f"{name} of kv_events_config", value)

    @property
    def publishes(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def of_replica(self, replica: int) -> KVEventsConfig:
        """The same for one of several replicas."""
        replay = self.replay_endpoint and shifted(self.replay_endpoint, replica)
        return dataclasses.replace(self, endpoint=shifted(self.endpoint, replica), replay_endpoint=replay)


def parse_kv_events(text: str | None) -> KVEventsConfig:
    """Read the option. None: nothing is published.

    Raises:
        ValueError: it is no JSON object, has other keys or values, or pyzmq is not installed.
    """
    if text is None:
        return KVEventsConfig()
    try:
        fields: Any = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"kv_events_config must be a JSON object like {_EXAMPLE}, got {text!r}")
    known = [field.name for field in dataclasses.fields(KVEventsConfig)]
    if unknown := [name for name in fields if name not in known]:
        raise ValueError(f"kv_events_config has the unknown key {unknown[0]!r}; known: {', '.join(known)}")
    config = KVEventsConfig(**{name: value for name, value in fields.items() if value is not None})
    if config.publishes:
        require_zmq("kv_events_config")
    return config


def require_zmq(what: str) -> None:
    """Raises ValueError: the package that speaks ZeroMQ is not installed."""
    if importlib.util.find_spec("zmq") is None:
        raise ValueError(f"{what} needs pyzmq: pip install 'shardline[kv-events]'")


def check_endpoint(what: str, endpoint: Any) -> str:
    """A ZeroMQ address of TCP or a Unix socket.

    Raises:
        ValueError: it is none.
    """
    scheme, _, rest = endpoint.partition("://") if isinstance(endpoint, str) else ("", "", "")
    port = rest.rpartition(":")[2]
    if (scheme == "ipc" and rest) or (scheme == "tcp" and rest.rpartition(":")[0] and _is_port(port)):
        return str(endpoint)
    raise ValueError(f"{what} must be like tcp://127.0.0.1:5557 or ipc:///run/kv, got {endpoint!r}")


def is_bound(endpoint: str) -> bool:
    """Whether a publisher listens at an address, as on the wildcard and on this host's own; else it connects there."""
    if not endpoint.startswith("tcp://"):
        return True
    host = urlsplit(endpoint).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "*" in endpoint
    return address.is_loopback or address.is_unspecified


def shifted(endpoint: str, replica: int) -> str:
    """The address of one of several replicas: a port further on for each, as in vLLM."""
    if replica == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{replica}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + replica}"


def _is_port(text: str) -> bool:
    return text.isdecimal() and len(text) < 6 and 0 < int(text) < 1 << 16
