"""What choosing the tokens of a step takes beside their logits, as tensors that travel to the device with the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from shardline.runtime.ops.penalties import Penalties
from shardline.runtime.sampling.last_tokens import LastTokens


class Draws(NamedTuple):
    """The arguments of `ops.sampling.sample`, one of each per row."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    choices: Tensor
    positions: Tensor


@dataclass(frozen=True)
class SamplingInput:
    """Of the R sampled rows of a step."""

    rows: Tensor
    """[R] int64: each sequence's place in LastTokens."""
    draws: Draws | None
    """None: nothing is wanted of a row but its largest logit."""
    penalties: Penalties | None

    def tensors(self) -> list[Tensor]:
        """All of them, for one copy."""
        optional = [part for part in self.penalties or () if part is not None]
        return [self.rows, *(self.draws or ()), *optional]

    def moved(self, tensors: Iterator[Tensor]) -> SamplingInput:
        """The same made of copies, in the order of `tensors`."""
        rows, draws, penalties = next(tensors), self.draws, self.penalties
        if draws is not None:
            draws = Draws(*(next(tensors) for _ in draws))
        if penalties is not None:
            # The optional one is last.
            penalties = Penalties(*(next(tensors) for part in penalties if part is not None))
        return SamplingInput(rows, draws, penalties)

    def known(self, last_tokens: LastTokens) -> SamplingInput:
        """With the tokens for which something stands, see LastTokens."""
        if self.penalties is None or self.penalties.uncounted is None:
            return self
        uncounted = last_tokens.known(self.penalties.uncounted)
        return dataclasses.replace(self, penalties=self.penalties._replace(uncounted=uncounted))
