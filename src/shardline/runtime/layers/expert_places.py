"""Where the whole experts of a layer lie: places are numbered over the ranks that share them, and experts move."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardline.models.partition import Span, split_dim


class ExpertPlaces:
    """The expert in each place of a layer. All ranks that share the layer agree on it between two steps.

    A token's products are added in the order in which it chose its experts, and an expert's bits are the same in every
    place, so no answer depends on the places.
    """

    def __init__(self, num_experts: int, num_places: int, num_ranks: int, device: torch.device) -> None:
        """Each rank has consecutive places. Those behind the experts' own have copies of the first experts."""
        self.spans: Sequence[Span] = split_dim(num_places, num_ranks)
        """The places of each rank."""
        self.bounds = torch.tensor([0, *(span.stop for span in self.spans)])
        """[num_ranks + 1] int64, in host memory: where each rank's places begin."""
        self.device_bounds = self.bounds.to(device)
        self.experts = [place % num_experts for place in range(num_places)]
        """The expert in each place."""
        # A recorded step reads these tables, so they stay where they are.
        width = 1 + num_places - num_experts
        self.places = torch.zeros(num_experts, width, dtype=torch.int32, device=device)
        self.copies = torch.zeros(num_experts, dtype=torch.int32, device=device)
        """The inputs of `ops.moe.exchange.place_slots`."""
        self._fill_tables()

    def put(self, changes: Sequence[tuple[int, int]]) -> None:
        """Note which (place, expert) are new."""
        for place, expert in changes:
            self.experts[place] = expert
        self._fill_tables()

    def _fill_tables(self) -> None:
        found: list[list[int]] = [[] for _ in range(len(self.places))]
        for place, expert in enumerate(self.experts):
            found[expert].append(place)
        assert all(found), "an expert has no place"
        width = self.places.shape[1]
        self.places.copy_(torch.tensor([places + [0] * (width - len(places)) for places in found]))
        self.copies.copy_(torch.tensor([len(places) for places in found]))
