"""The newest token of every sequence, on the device, which knows it before the host does.

The host plans and launches a step while the previous one still runs. In place of a token that is not sampled yet, it
writes a negative stand-in (see `sequences.stand_in`), which the device replaces before the step computes.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LastTokens:
    """One token per row of a SequenceTable; nothing here waits for the device."""

    def __init__(self, device: torch.device, num_rows: int) -> None:
        """`num_rows`: expected number of rows."""
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def reserve_rows(self, num_rows: int) -> None:
        """Make room for rows below `num_rows`."""
        have = len(self._tokens)
        if num_rows > have:
            self._tokens = torch.cat([self._tokens, self._tokens.new_zeros(num_rows)])

    def replace_stand_ins(self, ids: Tensor) -> Tensor:
        """`ids` [N] int64 with tokens in place of their stand-ins."""
        rows = (-1 - ids).clamp_(min=0, max=len(self._tokens) - 1)
        return torch.where(ids < 0, self._tokens[rows], ids)

    def put_tokens(self, rows: Tensor, tokens: Tensor) -> None:
        """Store `tokens` [N] as the newest tokens of the sequences in `rows` [N]."""
        self._tokens.index_copy_(0, rows, tokens.long())
