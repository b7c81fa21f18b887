"""The line that shows how far a node has loaded its weights."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

_LINE = "Loading weights: {percentage:.0f}% | {gigabytes} | {speed} | {seconds_left}"


class LoadingLine(tqdm):  # type: ignore[type-arg]
    """Such as `Loading weights: 37% | 3.1/8.5 GB | 2.31 GB/s | 2 s left`, on stderr."""

    def __init__(self, num_bytes: int, *, shown: bool) -> None:
        super().__init__(total=num_bytes, bar_format=_LINE, disable=not shown)
        self._left = float(num_bytes)

    def count(self, num_bytes: float) -> None:
        """Show `num_bytes` more. Packed panels are a little larger than their weights, so sums may pass the total."""
        added = min(num_bytes, self._left)
        self._left -= added
        self.update(added)

    @property
    def format_dict(self) -> dict[str, Any]:
        found = dict(super().format_dict)
        done, total, elapsed = found["n"], found["total"], found["elapsed"]
        speed = done / elapsed if elapsed else 0.0
        left = f"{max(0, total - done) / speed:.0f} s left" if speed else "? s left"
        return found | {
            "gigabytes": f"{done / 1e9:.1f}/{total / 1e9:.1f} GB",
            "speed": f"{speed / 1e9:.2f} GB/s",
            "seconds_left": left,
        }
