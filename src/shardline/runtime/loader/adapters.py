"""Brings adapters from their files into slots of the linears that they change."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shardline.checkpoints.adapters import read_adapter, state_of
from shardline.deployment.deployment import AdapterPlan
from shardline.messages.adapters import LoadAdapter, LookAtAdapter
from shardline.models.adapters import LinearChange
from shardline.models.partition import Span
from shardline.models.spec import DecoderSpec
from shardline.models.stored_layout import TensorEntry
from shardline.runtime.loader.gguf import original_rows
from shardline.runtime.loader.weights import mapped_tensor

_LOOK_SECONDS = 0.001
_KEPT_TENSORS = 4
"""Of one module, with the magnitude: a stack of experts has lora_A and lora_B of two."""


class AdaptedLinear(Protocol):
    """Stacked linears that adapters can change, or an embedding."""

    names: tuple[str, ...]
    """Their canonical names, without `.weight`."""
    spans: tuple[Span, ...]
    """The outputs of each that this rank owns."""
    own_whole: Span
    """The rows of a whole weight that this rank holds."""

    def clear(self, slot: int) -> None:
        """Empty a slot."""

    def put(self, slot: int, part: int, down: Tensor, up: Tensor, scale: float, magnitude: Tensor | None) -> None:
        """See `LinearAdapters.put`."""

    def put_whole(self, slot: int, rows: Tensor) -> None:
        """Give a slot a whole weight, in place of the base one."""


class AdapterLoader:
    """Loads adapters into the slots of a rank, beside its steps: none of them reads a slot before its load is over.

    One adapter loads at a time, in the order of the commands, so that steps are slowed down little.
    """

    def __init__(self, linears: Sequence[AdaptedLinear], spec: DecoderSpec, plan: AdapterPlan) -> None:
        self._linears = linears
        self._spec = spec
        self._plan = plan
        self._loads: dict[int, _Load] = {}
        """The last one of each slot."""
        self._last: _Load | None = None

    def load(self, command: LoadAdapter) -> None:
        """Put an adapter into a slot.

        Raises:
            ValueError: it cannot be used, or is another one by now. The slot is empty.
        """
        folder, digest = Path(command.adapter.folder), command.adapter.digest
        load_adapter(self._linears, command.slot, folder, digest, self._spec, self._plan)

    def begin(self, command: LoadAdapter) -> None:
        """See `LoadAdapter`."""
        assert self._linears, "the deployment takes no adapters"
        self._last = self._loads[command.slot] = _Load(partial(self.load, command), self._last)
        self._last.start()

    def look(self, command: LookAtAdapter) -> bool:
        """See `LookAtAdapter`. This waits a little, so that an engine without steps does not ask all the time.

        Raises:
            ValueError: the rank refuses the adapter.
        """
        load = self._loads[command.slot]
        load.join(_LOOK_SECONDS)
        if load.is_alive():
            return False
        if load.error is not None:
            raise load.error
        return True


class _Load(threading.Thread):
    """A load that begins when the one before it is over."""

    def __init__(self, work: Callable[[], None], before: _Load | None) -> None:
        super().__init__(name="load-adapter", daemon=True)
        self.error: BaseException | None = None
        self._work, self._before = work, before

    def run(self) -> None:
        if self._before is not None:
            self._before.join()
            self._before = None
        try:
            self._work()
        except BaseException as error:  # the rank answers with it
            self.error = error


def load_adapter(
    linears: Iterable[AdaptedLinear], slot: int, folder: Path, digest: str, spec: DecoderSpec, plan: AdapterPlan
) -> None:
    """Put the adapter in `folder` into a slot of `linears`.

    Raises:
        ValueError: it cannot be used, or its content is not that of the digest. The slot is empty.
    """
    for linear in linears:
        linear.clear(slot)
    state = state_of(folder)
    adapter = read_adapter(folder, spec, plan.max_rank, kinds=plan.kinds, experts=plan.experts)
    has_changed = f"the adapter in {folder} has changed since it was loaded; load it again under a new name"
    if adapter.digest() != digest:
        raise ValueError(has_changed)
    files = _Files()
    found = {one.name.removesuffix(".weight"): one for one in adapter.linears}
    wholes = {one.name.removesuffix(".weight"): one for one in adapter.wholes}
    try:
        for linear in linears:
            for part, (name, span) in enumerate(zip(linear.names, linear.spans, strict=True)):
                if (own := found.get(name)) is not None:
                    down, up = _read(own, span, files)
                    linear.put(slot, part, down, up, own.scale, _read_magnitude(own, span, files))
                if (whole := wholes.get(name)) is not None:
                    own_rows = files.rows(whole.weight, linear.own_whole)
                    _check_finite(name, own_rows)
                    linear.put_whole(slot, own_rows)
        if state_of(folder) != state:
            raise ValueError(has_changed)
    except ValueError:
        for linear in linears:
            linear.clear(slot)
        raise


class _Files:
    """Reads tensors of files that others may write meanwhile: if a mapped file became shorter, the process would end.

    The last tensors are kept, since each expert of a stack reads its part of the same ones.
    """

    def __init__(self) -> None:
        self._read: OrderedDict[TensorEntry, Tensor] = OrderedDict()

    def tensor(self, entry: TensorEntry) -> Tensor:
        """The tensor.

        Raises:
            ValueError: the file ends before it does, or cannot be read.
        """
        found = self._read.get(entry)
        if found is None:
            if len(self._read) == _KEPT_TENSORS:
                self._read.popitem(last=False)
            try:
                stored = torch.from_numpy(np.fromfile(entry.file, np.uint8, entry.num_bytes, offset=entry.offset))
            except OSError as error:
                raise ValueError(f"{entry.file} cannot be read: {error.strerror or error}") from None
            found = self._read[entry] = mapped_tensor(replace(entry, offset=0), mapped=stored)
        return found

    def rows(self, entry: TensorEntry, span: Span) -> Tensor:
        """Rows of a tensor; raises as `tensor`."""
        row_bytes = entry.num_bytes // entry.shape[0]
        shape = (span.stop - span.start, *entry.shape[1:])
        offset, num_bytes = entry.offset + span.start * row_bytes, shape[0] * row_bytes
        return self.tensor(replace(entry, shape=shape, offset=offset, num_bytes=num_bytes))


def _read(linear: LinearChange, span: Span, files: _Files) -> tuple[Tensor, Tensor]:
    """down [rank, in] and the rows `span` of up [out, rank], in float32.

    Raises:
        ValueError: they are not finite.
    """
    first = linear.expert * linear.rank
    down, up = files.tensor(linear.down).flatten(0, -2), files.tensor(linear.up).flatten(0, -2)[linear.rows]
    down = down.T.float() if linear.transposed else down[first : first + linear.rank].float()
    if linear.in_columns:
        up = up[:, linear.expert :: linear.num_experts]
    rows = slice(span.start, span.stop)
    up = up[original_rows(span, linear.interleaved_heads) if linear.interleaved_heads else rows].float()
    for tensor in (down, up):
        _check_finite(linear.name.removesuffix(".weight"), tensor)
    return down, up


def _read_magnitude(linear: LinearChange, span: Span, files: _Files) -> Tensor | None:
    """The elements `span` of the magnitude, in float32; None: there is none.

    Raises:
        ValueError: they are not finite.
    """
    if linear.magnitude is None:
        return None
    magnitude = files.tensor(linear.magnitude)[linear.rows][span.start : span.stop].float()
    _check_finite(linear.name.removesuffix(".weight"), magnitude)
    return magnitude


def _check_finite(name: str, tensor: Tensor) -> None:
    # A sum is finite only if all elements are, and fast; it may also overflow.
    if not math.isfinite(float(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"the adapter has NaN or Inf in {name}")
