"""The progress bar of an offline batch."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from shardline.api.outputs import RequestOutput


class ProgressBar:
    """Shows finished requests and tokens per second on stderr; shows nothing unless `enabled`."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._start = time.monotonic()
        self._tokens_in = 0
        self._tokens_out = 0
        self._bar: Any = None
        if enabled and total:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc="Prompts", unit="prompt", dynamic_ncols=True, postfix=self._rates())

    def count_request(self, output: RequestOutput) -> None:
        """Count one finished request."""
        self._tokens_in += len(output.prompt_token_ids)
        self._tokens_out += sum(len(choice.token_ids) for choice in output.outputs)
        if self._bar is not None:
            self._bar.set_postfix_str(self._rates(), refresh=False)
            self._bar.update(1)

    def _rates(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        return f"in {self._tokens_in / seconds:.0f} tok/s, out {self._tokens_out / seconds:.0f} tok/s"

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
