"""The log probabilities that requests ask for, read from rows of logits.

Most rows report their token and the few most likely ones: one kernel call for all rows. A row that reports many tokens,
or tokens that its request names, has a call of its own, so that it does not widen the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.messages.request import TokenLogprobs
from shardline.runtime.ops.sampling.logprobs import Logprobs, logprobs
from shardline.runtime.ops.sampling.sample import GREEDY_BELOW
from shardline.runtime.sampling.inputs import Draws

_NARROW = 64
"""The most likely tokens that a row reports without a call of its own."""


class Wanted(NamedTuple):
    """What one row reports beside the log probability of its token."""

    top_n: int
    """How many of the most likely tokens."""
    token_ids: tuple[int, ...] = ()
    """The tokens that are reported instead of these; empty: none are named."""

    @property
    def is_narrow(self) -> bool:
        """Whether the call for all rows suffices."""
        return self.top_n <= _NARROW and not self.token_ids


class Reports(NamedTuple):
    """What rows report, as tensors."""

    rows: Logprobs
    """Of every row: its token, and as many of the most likely ones as any narrow row reports."""
    own: list[Logprobs]
    """For each row that is not narrow, in order: its token with the most likely ones, or one row for each named token.
    """

    def list_tensors(self) -> list[Tensor]:
        """All tensors, to be copied."""
        return [tensor for part in (self.rows, *self.own) for tensor in part]

    @classmethod
    def from_copies(cls, tensors: Sequence[Tensor]) -> Reports:
        """The same with copies of the tensors, in the order of `list_tensors`."""
        size = len(Logprobs._fields)
        rows, *own = (Logprobs(*tensors[first : first + size]) for first in range(0, len(tensors), size))
        return cls(rows, own)


def report(
    kernels: Kernels, values: Tensor, chosen: Tensor, wanted: Sequence[Wanted | None], *, as_logits: bool
) -> Reports:
    """What rows of logits [M, V] fp32 report, whose tokens are `chosen` [M]; `as_logits`: logits instead of log
    probabilities."""

    def read(rows: Tensor, ids: Tensor, count: int) -> Logprobs:
        found = logprobs(kernels, rows, ids, count)
        return _with_logits(found, rows, ids) if as_logits else found

    chosen = chosen.to(torch.int64)
    widest = max((one.top_n for one in wanted if one is not None and one.is_narrow), default=0)
    own = []
    for row, one in enumerate(wanted):
        if one is None or one.is_narrow:
            continue
        if one.token_ids:
            ids = torch.tensor(one.token_ids, device=values.device)
            own.append(read(values[row].expand(len(ids), -1), ids, 0))
        else:
            own.append(read(values[row : row + 1], chosen[row : row + 1], one.top_n))
    return Reports(read(values, chosen, widest), own)


def _with_logits(found: Logprobs, rows: Tensor, ids: Tensor) -> Logprobs:
    top = rows.gather(1, found.top_ids.clamp(min=0))
    return found._replace(
        chosen_logprobs=rows.gather(1, ids[:, None])[:, 0],
        top_logprobs=torch.where(found.top_ids < 0, torch.full_like(top, -math.inf), top),
    )


def read_reports(
    reports: Reports, wanted: Sequence[Wanted | None], chosen: Sequence[int]
) -> list[TokenLogprobs | None]:
    """For each row what it reports, None if it reports nothing; the tensors are in host memory."""
    values, ranks, top_ids, top_values = (tensor.tolist() for tensor in reports.rows)
    own = iter(reports.own)
    read: list[TokenLogprobs | None] = []
    for row, one in enumerate(wanted):
        if one is None:
            read.append(None)
        elif one.is_narrow:
            read.append(_most_likely(values[row], ranks[row], top_ids[row][: one.top_n], top_values[row]))
        elif one.token_ids:
            part = next(own)
            named = zip(one.token_ids, part.chosen_logprobs.tolist(), part.chosen_ranks.tolist(), strict=True)
            others = [entry for entry in named if entry[0] != chosen[row]]
            ids, logs, own_ranks = zip((chosen[row], values[row], ranks[row]), *others, strict=True)
            read.append(TokenLogprobs(values[row], ranks[row], list(ids), list(logs), list(own_ranks)))
        else:
            part = next(own)
            read.append(_most_likely(values[row], ranks[row], part.top_ids[0].tolist(), part.top_logprobs[0].tolist()))
    return read


def _most_likely(value: float, rank: int, top_ids: list[int], top_values: list[float]) -> TokenLogprobs:
    if -1 in top_ids:  # the vocabulary has fewer
        top_ids = top_ids[: top_ids.index(-1)]
    return TokenLogprobs(value, rank, top_ids, top_values[: len(top_ids)])


def processed_logits(logits: Tensor, draws: Draws) -> Tensor:
    """Logits [M, V] at the temperature of each row, -inf where a token cannot be drawn; see `ops.sampling.sample`.

    `draws`: in host memory. Greedy rows stay as they are. This is for reports only: the kernel that draws filters for
    itself.
    """
    return torch.stack([_processed(row, *(float(draws[place][index]) for place in range(4)))
                        for index, row in enumerate(logits)])  # fmt: skip


def _processed(row: Tensor, temperature: float, top_k: float, top_p: float, min_p: float) -> Tensor:
    if temperature < GREEDY_BELOW:
        return row
    scaled = row.double() / temperature
    weights = (scaled - scaled.max()).exp()
    dropped = weights < min_p
    if 0 < top_k < len(row):
        dropped |= row < row.topk(int(top_k)).values[-1]
    if top_p < 1.0:
        weights = weights.masked_fill(dropped, 0.0)
        order = row.sort(descending=True, stable=True).indices
        before = weights[order].cumsum(0) - weights[order]
        dropped[order[before >= top_p * weights.sum()]] = True
    return scaled.float().masked_fill(dropped, -math.inf)
