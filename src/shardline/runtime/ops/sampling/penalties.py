"""Penalties, logit bias and banned tokens, for a whole batch in one call."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from shardline.kernels.contract import Kernels


class Penalties(NamedTuple):
    """The changes to logits [M, V]. The entries of row r are offsets[r] : offsets[r + 1]; an id occurs once per row."""

    offsets: Tensor  # int32 [M + 1]
    ids: Tensor  # int32 [num_entries]
    output_counts: Tensor  # int32 [num_entries]: how often the output so far has the token
    in_prompt: Tensor  # bool [num_entries]
    bias: Tensor  # float32 [num_entries]: added to the logit; -inf bans the token
    repetition: Tensor  # float32 [M]; off: 1.0
    presence: Tensor  # float32 [M]; off: 0.0
    frequency: Tensor  # float32 [M]; off: 0.0
    uncounted: Tensor | None = None
    """int64 [M]: the newest output token of each row, if the entries do not count it because the host does not know it
    yet; else `sequences.NO_TOKEN`. None: the host knows every token."""


def penalize_(kernels: Kernels, logits: Tensor, penalties: Penalties) -> Tensor:
    """Change logits in place. First the bias is added. Then the logits of tokens in the prompt or output are divided by
    `repetition` (negative logits are multiplied). Then `frequency` is subtracted for each occurrence in the output, and
    `presence` once."""
    p = penalties
    kernels.penalize(
        logits,
        p.repetition,
        p.presence,
        p.frequency,
        p.offsets,
        p.ids,
        p.output_counts,
        p.in_prompt,
        p.bias,
        p.uncounted,
    )
    return logits


def penalize_reference(logits: Tensor, penalties: Penalties) -> Tensor:
    p = penalties
    out = logits.clone()
    for row in range(logits.shape[0]):
        entries = range(int(p.offsets[row]), int(p.offsets[row + 1]))
        changes = {int(p.ids[i]): (int(p.output_counts[i]), bool(p.in_prompt[i]), float(p.bias[i])) for i in entries}
        last = -1 if p.uncounted is None else int(p.uncounted[row])
        if 0 <= last < logits.shape[1]:
            count, in_prompt, bias = changes.get(last, (0, False, 0.0))
            changes[last] = (count + 1, in_prompt, bias)
        for token, (count, in_prompt, bias) in changes.items():
            logit = out[row, token] + bias
            if count > 0 or in_prompt:
                logit = logit / p.repetition[row] if logit > 0 else logit * p.repetition[row]
            if count > 0:
                logit = logit - p.frequency[row] * count - p.presence[row]
            out[row, token] = logit
    return out
