"""The newest token of every sequence on the device, which has it before the host does.

The host plans and launches a step while the one before still runs. Where it needs a token that this one will sample, it
writes down what stands for it: a negative number, which the device replaces before it computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_TOKEN = torch.iinfo(torch.int64).max
"""Stands for no token, and for none to come."""


def stand_in(row: int) -> int:
    """What stands for the newest token of the sequence in `row` of a SequenceTable."""
    return -1 - row


class LastTokens:
    """One token per row of a SequenceTable; nothing here waits for the device."""

    def __init__(self, device: torch.device, num_rows: int) -> None:
        """`num_rows`: as many as are expected."""
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def reserve(self, num_rows: int) -> None:
        """Make room for rows below `num_rows`."""
        have = len(self._tokens)
        if num_rows > have:
            self._tokens = torch.cat([self._tokens, self._tokens.new_zeros(num_rows)])

    def known(self, ids: Tensor) -> Tensor:
        """`ids` [N] int64 with tokens in the place of what stands for them."""
        rows = (-1 - ids).clamp_(min=0, max=len(self._tokens) - 1)
        return torch.where(ids < 0, self._tokens[rows], ids)

    def put(self, rows: Tensor, tokens: Tensor) -> None:
        """`tokens` [N] are the newest of the sequences in `rows` [N]."""
        self._tokens.index_copy_(0, rows, tokens.long())
