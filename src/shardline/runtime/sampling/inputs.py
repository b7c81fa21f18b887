"""What sampling needs beside the logits, as tensors that travel to the device with the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from shardline.runtime.ops.sampling.penalties import Penalties


class Draws(NamedTuple):
    """The arguments of `ops.sampling.sample.sample`, one of each per row."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    choices: Tensor
    positions: Tensor


@dataclass(frozen=True)
class SamplingInput:
    """What the R sampled rows of a step ask for."""

    rows: Tensor
    """[R] int64: each sequence's row in the SequenceTable."""
    draws: Draws | None
    """None: all rows are greedy and report nothing else."""
    penalties: Penalties | None

    def list_tensors(self) -> list[Tensor]:
        """All of them, for one copy."""
        optional = [part for part in self.penalties or () if part is not None]
        return [self.rows, *(self.draws or ()), *optional]

    def from_copies(self, tensors: Iterator[Tensor]) -> SamplingInput:
        """The same made of copies, in the order of `tensors`."""
        rows, draws, penalties = next(tensors), self.draws, self.penalties
        if draws is not None:
            draws = Draws(*(next(tensors) for _ in draws))
        if penalties is not None:
            # The optional one is last.
            penalties = Penalties(*(next(tensors) for part in penalties if part is not None))
        return SamplingInput(rows, draws, penalties)

    def replace_stand_ins(self, replace: Callable[[Tensor], Tensor]) -> SamplingInput:
        """With known tokens in the place of stand-ins; `replace` maps ids [N] int64."""
        if self.penalties is None or self.penalties.uncounted is None:
            return self
        uncounted = replace(self.penalties.uncounted)
        return dataclasses.replace(self, penalties=self.penalties._replace(uncounted=uncounted))
