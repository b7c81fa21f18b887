"""What stands for an engine in a server that renders prompts only: it reads configurations and no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardline.api.engines import EngineEvent
from shardline.config.engine import EngineConfig
from shardline.deployment.fingerprint import NumericContract
from shardline.deployment.length import check_length
from shardline.messages.engine import EngineReady
from shardline.messages.request import Request

_BLOCK_SIZE = 16


class Renderer:
    """A client of no engine; see `Client`. It knows the longest prompt, and takes no requests."""

    def __init__(self, config: EngineConfig, replica: int, on_event: Callable[[EngineEvent], None]) -> None:
        self._config = config

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        """Read the model's configuration.

        Raises:
            ValueError: there is no such model, or max_model_len is more than it has.
        """
        from shardline.checkpoints.description import resolve_configured
        from shardline.checkpoints.lookup import decoder_spec

        asked = self._config.model.max_model_len
        spec = decoder_spec(resolve_configured(self._config.model, weights=False).config)
        check_length(asked, spec)
        longest = asked if isinstance(asked, int) else spec.max_position_embeddings
        report = ["no weights are loaded: this server renders and tokenizes, and generates nothing"]
        return EngineReady(longest, _BLOCK_SIZE, NumericContract("none"), 0.0, report)

    def add(self, requests: Sequence[Request]) -> None:
        """Never called: a server that renders has no endpoint that generates."""
        raise AssertionError(f"{len(requests)} requests for a server without an engine")

    def abort(self, request_ids: Sequence[str]) -> None:
        """There is nothing to abort."""

    def reset_prefix_cache(self) -> None:
        """There is no cache."""

    def close(self, timeout: float = 10.0) -> None:
        """Nothing runs."""
