"""One token per row of logits, with all that changes logits before and reports them after."""

from __future__ import annotations

import torch
from torch import Tensor

_GREEDY_BELOW = 1e-5
_WORD = 0xFFFFFFFF
_MIXERS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
"""Shifts and factors of SplitMix64, see `runtime.ops.sampling.row_digests`."""


def greedy_argmax(logits: Tensor, ids: Tensor, values: Tensor) -> None:
    known = _without_nan(logits)
    torch.argmax(known, 1, out=ids)
    values.copy_(known.gather(1, ids[:, None])[:, 0])


def row_digests(logits: Tensor, digests: Tensor) -> None:
    places = torch.arange(logits.shape[1], device=logits.device) << 32
    mixed = places | (logits.contiguous().view(torch.int32).long() & _WORD)
    for shift, factor in _MIXERS:
        mixed = (mixed ^ _shift_right(mixed, shift)) * factor
    torch.sum(mixed ^ _shift_right(mixed, 31), 1, out=digests)


def _shift_right(values: Tensor, shift: int) -> Tensor:
    """Of int64, as if it had no sign."""
    return (values >> shift) & ((1 << (64 - shift)) - 1)


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    allowed = (bits[..., None] >> torch.arange(32, device=bits.device)) & 1
    allowed = allowed.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def penalize(
    logits: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    offsets: Tensor,
    ids: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
    bias: Tensor,
    uncounted: Tensor | None,
) -> None:
    rows = torch.repeat_interleave(torch.arange(len(logits), device=logits.device), offsets.diff().long())
    if uncounted is not None:
        rows, ids, output_counts, in_prompt, bias = _with_newest(
            rows, ids, output_counts, in_prompt, bias, uncounted, logits.shape[1]
        )
    place = rows, ids.long()
    logit = logits[place] + bias
    factor = repetition[rows]
    repeated = torch.where(logit > 0, logit / factor, logit * factor)
    logit = torch.where((output_counts > 0) | in_prompt, repeated, logit)
    lowered = logit - frequency[rows] * output_counts - presence[rows]
    logits[place] = torch.where(output_counts > 0, lowered, logit)


def _with_newest(
    rows: Tensor,
    ids: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
    bias: Tensor,
    newest: Tensor,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The entries with one more count of each row's newest token, which gets an entry if it has none."""
    is_it = ids == newest[rows]
    has_entry = torch.zeros(len(newest), dtype=torch.bool, device=ids.device)
    has_entry[rows[is_it]] = True
    new_rows = ((newest >= 0) & (newest < vocab_size) & ~has_entry).nonzero()[:, 0]
    count = len(new_rows)
    return (
        torch.cat([rows, new_rows]),
        torch.cat([ids.long(), newest[new_rows]]),
        torch.cat([output_counts + is_it, output_counts.new_ones(count)]),
        torch.cat([in_prompt, in_prompt.new_zeros(count)]),
        torch.cat([bias, bias.new_zeros(count)]),
    )


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    choices: Tensor,
    positions: Tensor,
    purpose: int,
    tokens: Tensor,
) -> None:
    known = _with_float64(_without_nan(logits))
    temperature, top_k, top_p, min_p, seeds, choices, positions = (
        part.to(known.device) for part in (temperature, top_k, top_p, min_p, seeds, choices, positions)
    )
    best = known.argmax(1)
    largest = known.gather(1, best[:, None])
    # An infinite logit has all the mass. If all logits are -inf or NaN, there is no distribution to draw from.
    is_drawn = (temperature >= _GREEDY_BELOW) & largest[:, 0].isfinite()
    divisor = temperature.clamp(min=_GREEDY_BELOW)[:, None]
    weights = torch.exp((known - largest).double() / divisor).masked_fill(~is_drawn[:, None], 0.0)
    weights = weights.masked_fill(weights < min_p[:, None], 0.0)
    vocab_size = known.shape[1]
    limits_k = (top_k > 0) & (top_k < vocab_size)
    if bool((limits_k | (top_p < 1.0)).any()):
        ranked, order = known.sort(dim=1, descending=True, stable=True)
        least = ranked.gather(1, torch.where(limits_k, top_k, vocab_size)[:, None].long() - 1)
        weights = weights.masked_fill(known < least, 0.0)
        # Before each token: the mass of those that are likelier.
        mass = weights.gather(1, order).cumsum(1)
        before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], 1)
        is_over = (before >= top_p[:, None] * mass[:, -1:]) & (top_p < 1.0)[:, None]
        is_over[:, 0] = False
        weights = weights.masked_fill(torch.zeros_like(is_over).scatter(1, order, is_over), 0.0)
    mass = weights.cumsum(1)
    target = _uniform(seeds, choices, positions, purpose)[:, None] * mass[:, -1:]
    drawn = torch.searchsorted(mass, target, right=True)[:, 0].clamp(max=vocab_size - 1)
    tokens.copy_(torch.where(is_drawn, drawn, best))


def logprobs(
    logits: Tensor,
    chosen: Tensor,
    top_n: int,
    chosen_logprobs: Tensor,
    chosen_ranks: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
) -> None:
    all_logprobs = _with_float64(logits).double().log_softmax(1)
    chosen_logprobs.copy_(all_logprobs.gather(1, chosen[:, None].to(all_logprobs.device))[:, 0])
    chosen_ranks.copy_((logits > logits.gather(1, chosen[:, None])).sum(1) + 1)
    if top_n == 0:
        return
    count = min(top_n, logits.shape[1])
    # A stable sort puts the lowest id first.
    ids = _without_nan(logits).sort(dim=1, descending=True, stable=True).indices[:, :count]
    top_ids[:, :count] = ids
    top_ids[:, count:] = -1
    top_logprobs[:, :count] = all_logprobs.gather(1, ids.to(all_logprobs.device)).to(top_logprobs)
    top_logprobs[:, count:] = -torch.inf


def _without_nan(logits: Tensor) -> Tensor:
    return logits.nan_to_num(-torch.inf, torch.inf, -torch.inf)


def _with_float64(logits: Tensor) -> Tensor:
    """The logits on a device that has float64."""
    return logits.cpu() if logits.device.type == "mps" else logits


def _uniform(seeds: Tensor, choices: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """A double in [0, 1) with 53 random bits for each row.

    Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3") with key = seed and counter =
    (position, choice, purpose). Words are in int64, whose products overflow as those of uint64 do.
    """
    counter = [positions & _WORD, (positions >> 32) & _WORD, choices & _WORD, torch.full_like(choices, purpose)]
    key = [seeds & _WORD, (seeds >> 32) & _WORD]
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            ((second >> 32) & _WORD) ^ counter[1] ^ key[0],
            second & _WORD,
            ((first >> 32) & _WORD) ^ counter[3] ^ key[1],
            first & _WORD,
        ]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    return (counter[0] << 21 | counter[1] >> 11).double() * 2.0**-53
