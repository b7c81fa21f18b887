"""The front's handle on one engine process (one data-parallel replica)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardline.config.engine import EngineConfig
from shardline.engine.ipc import EngineFailed, EngineOutputs, EngineReady
from shardline.types import Request


class EngineClient:
    """Starts an engine process and talks to it.

    `on_message` is called from a reader thread of this client, once per EngineOutputs, and once with EngineFailed
    when the engine has failed or its process has ended unasked.
    """

    def __init__(
        self, config: EngineConfig, replica: int, on_message: Callable[[EngineOutputs | EngineFailed], None]
    ) -> None: ...

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        """Block until the engine can take requests.

        Raises:
            ValueError: the configuration is at fault.
            RuntimeError: the engine failed or ended.
        """

    def add(self, requests: Sequence[Request]) -> None:
        """Hand requests to the engine."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; outputs already under way may still arrive."""

    def close(self, timeout: float = 10.0) -> None:
        """End the engine process and wait for it; killed where it does not end in time."""
