"""Transfers between host memory and a GPU that the host does not wait for: steps to the GPU, counters to the host."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from shardline.runtime.backends.cuda.download import Download
from shardline.runtime.step import KVGroupInput, SampledTokens, ScoredTokens, StepInput


class DeviceCounters:
    """See `base.Counters`.

    `publish_counts` starts a copy after a step, at most once per interval, and a later call finds the copy done. So the
    host's values may lag by one interval and one step.
    """

    _INTERVAL = 0.5  # seconds

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self._host = host
        self.counts = host.to(device)
        self._due = 0.0
        self._download: Download | None = None

    def publish_counts(self) -> None:
        if (now := time.monotonic()) >= self._due:
            self._download = Download([self.counts], self.counts.device)
            self._due = now + self._INTERVAL
        if self._download is not None and self._download.is_done:
            (counters,) = self._download.wait()
            self._host.copy_(counters)
            self._download = None


class Uploader:
    """Steps from host memory to a device, in one copy for which the host does not wait."""

    _ALIGNMENT = 16  # bytes; this also lets kernels load whole vectors

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def upload(self, step: StepInput) -> StepInput:
        """The step with all its tensors on the device, parts of one buffer."""
        tensors = [step.token_ids, step.positions, step.query_starts, step.context_lens]
        for group in step.kv_groups:
            tensors += [group.block_tables.contiguous(), group.slots]
        if (sampled := step.sampled) is not None:
            tensors += [sampled.rows, sampled.query_starts, sampled.context_lens, *sampled.block_tables]
        if (scored := step.scored) is not None:
            tensors += [scored.rows, scored.targets, scored.sampled]
        if step.sampling is not None:
            tensors += step.sampling.list_tensors()
        on_device = iter(self._copy(tensors))
        return StepInput(
            token_ids=next(on_device),
            positions=next(on_device),
            query_starts=next(on_device),
            context_lens=next(on_device),
            kv_groups=tuple(KVGroupInput(next(on_device), next(on_device)) for _ in step.kv_groups),
            replica_tokens=step.replica_tokens,
            replica_samples=step.replica_samples,
            sampled=None
            if sampled is None
            else SampledTokens(
                next(on_device), next(on_device), next(on_device), tuple(next(on_device) for _ in step.kv_groups)
            ),
            scored=None if scored is None else ScoredTokens(next(on_device), next(on_device), next(on_device)),
            greedy=step.greedy,
            sampling=None if step.sampling is None else step.sampling.from_copies(on_device),
        )

    def _copy(self, tensors: list[Tensor]) -> list[Tensor]:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // self._ALIGNMENT) * self._ALIGNMENT
        if self._copied is not None:
            self._copied.synchronize()  # the previous step's copy, which is long done
        if end > len(self._staging):
            self._staging = torch.empty(2 * end, dtype=torch.uint8, pin_memory=self._pinned)
        for start, tensor in zip(starts, tensors, strict=True):
            self._staging[start : start + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
        uploaded = self._staging[:end].to(self._device, non_blocking=True, copy=True)
        if self._pinned:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return [
            uploaded[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]
