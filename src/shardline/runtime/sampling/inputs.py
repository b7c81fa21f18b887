"""The inputs of sampling other than the logits, as tensors that are sent to the device with the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from shardline.runtime.ops.sampling.penalties import Penalties


class Draws(NamedTuple):
    """The arguments of `ops.sampling.sample.sample`, one value per row in each."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    choices: Tensor
    positions: Tensor


@dataclass(frozen=True)
class SamplingInput:
    """The sampling inputs of the R sampled rows of a step."""

    rows: Tensor
    """[R] int64: each sequence's row in the SequenceTable."""
    draws: Draws | None
    """None: all rows are greedy and report only their token."""
    penalties: Penalties | None

    def list_tensors(self) -> list[Tensor]:
        """All tensors, to be copied at once."""
        optional = [part for part in self.penalties or () if part is not None]
        return [self.rows, *(self.draws or ()), *optional]

    def from_copies(self, tensors: Iterator[Tensor]) -> SamplingInput:
        """The same with copies of the tensors, in the order of `list_tensors`."""
        rows, draws, penalties = next(tensors), self.draws, self.penalties
        if draws is not None:
            draws = Draws(*(next(tensors) for _ in draws))
        if penalties is not None:
            # The optional tensor is last.
            penalties = Penalties(*(next(tensors) for part in penalties if part is not None))
        return SamplingInput(rows, draws, penalties)

    def replace_stand_ins(self, replace: Callable[[Tensor], Tensor]) -> SamplingInput:
        """The same with stand-ins replaced by tokens; `replace` maps ids [N] int64."""
        if self.penalties is None or self.penalties.uncounted is None:
            return self
        uncounted = replace(self.penalties.uncounted)
        return dataclasses.replace(self, penalties=self.penalties._replace(uncounted=uncounted))
