"""The log of requests that are refused before they reach the application. Nobody can fill the log with them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

logger = logging.getLogger(__name__)

INTERVAL = 10.0
"""Seconds for which later refusals are counted, after a line."""
_MOST_ADDRESSES = 1000
_NAMED = 3


class RefusedRequests:
    """Logs the first refusal at once, and later ones as a count per INTERVAL, with the addresses of the clients."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._is_counting = False

    def note(self, client: str, status: int, message: str) -> None:
        """A client's request was refused. Call it on the event loop."""
        if not self._is_counting:
            logger.warning("refused a request from %s: %d %s", client, status, message)
            self._wait()
        elif client in self._counts or len(self._counts) < _MOST_ADDRESSES:
            self._counts[client] += 1
        else:
            self._counts["others"] += 1

    def _wait(self) -> None:
        self._is_counting = True
        asyncio.get_running_loop().call_later(INTERVAL, self._tell)

    def _tell(self) -> None:
        counts, self._counts = self._counts, Counter()
        if not counts:
            self._is_counting = False
            return
        named = [f"{client} ({count})" for client, count in counts.most_common(_NAMED)]
        more = f" and {len(counts) - _NAMED} more" if len(counts) > _NAMED else ""
        logger.warning("refused %d more requests in %g s, from %s%s", counts.total(), INTERVAL, ", ".join(named), more)
        self._wait()
