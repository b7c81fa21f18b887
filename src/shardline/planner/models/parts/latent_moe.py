"""Experts that compute in a smaller space than the residual stream's."""

from __future__ import annotations

from shardline.models.feed_forward import MoE
from shardline.models.partition import Span
from shardline.models.parts import Parameters, linear_parameters


class PlannedMoE(MoE, frozen=True, array_like=True, tag=True):
    """Experts with `latent` inputs and outputs, and projections into that space and out of it."""

    latent: int = 1024

    @property
    def num_launches(self) -> int:
        """See `MoE.num_launches`."""
        return super().num_launches + 2

    def expert_width(self, hidden_size: int) -> int:
        """Elements of an expert's inputs and outputs."""
        return self.latent

    def split(self, part: str, rank: int, ranks: int) -> Span | None:
        """See `Dense.split`. Every rank has the projections."""
        is_whole = part in ("feed_forward.latent_down", "feed_forward.latent_up")
        return None if is_whole else super().split(part, rank, ranks)

    def expert_parameters(self, hidden_size: int, num_experts: int) -> Parameters:
        """See `MoE.expert_parameters`."""
        yield from linear_parameters("feed_forward.latent_down", self.latent, hidden_size)
        yield from linear_parameters("feed_forward.latent_up", hidden_size, self.latent)
        yield from super().expert_parameters(hidden_size, num_experts)
