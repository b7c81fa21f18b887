"""Copies from a device to host memory, without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Download:
    """Tensors on their way to host memory. Their arrival also shows that all earlier launches are done."""

    is_immediate = False

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        # torch uses pinned memory for a non-blocking copy, and keeps it until the copy is done.
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._copied is None or self._copied.query()  # type: ignore[no-untyped-call]

    def wait(self) -> list[Tensor]:
        """Wait for the tensors and return them, in host memory; may be called from any thread."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors
