from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops.sampling.penalties import Penalties, penalize_reference
from tests.kernels.cuda.helpers import KERNELS
from tests.runtime.ops.helpers import assert_same_bits, randn
from tests.runtime.ops.sampling.test_penalties import no_penalties, random_penalties


def penalized(logits: torch.Tensor, p: Penalties) -> torch.Tensor:
    out = logits.clone()
    given = (p.repetition, p.presence, p.frequency, p.offsets, p.ids, p.output_counts, p.in_prompt, p.bias)
    KERNELS.penalize(out, *given, p.uncounted)
    return out


def test_matches_reference(rng):
    logits, penalties = randn(6, 50, rng=rng), random_penalties(rng, 6, 50)
    torch.testing.assert_close(penalized(logits, penalties), penalize_reference(logits, penalties))
    assert_same_bits(penalized(logits, no_penalties(6)), logits)


def test_rows_of_many_entries(rng):
    penalties = random_penalties(rng, 200, 700)  # up to 597 of them: several blocks
    logits = randn(200, 700, rng=rng)
    torch.testing.assert_close(penalized(logits, penalties), penalize_reference(logits, penalties))


@pytest.mark.parametrize("is_known", [True, False], ids=["among the entries", "new"])
def test_a_token_that_the_host_has_not_seen_counts_like_any_other(rng, is_known):
    """To the bit: nobody can tell when the host saw it."""
    logits, vocab_size = randn(4, 60, rng=rng), 60
    before = random_penalties(rng, 4, vocab_size)
    last = []
    for row in range(4):
        entries = before.ids[before.offsets[row] : before.offsets[row + 1]].tolist()
        others = [token for token in range(vocab_size) if token not in entries]
        last.append(entries[-1] if is_known and entries else others[7])
    uncounted = torch.tensor(last)
    uncounted[0] = torch.iinfo(torch.int64).max  # none
    columns: list[list[float]] = [[], [], [], []]
    offsets = [0]
    for row in range(4):
        span = slice(int(before.offsets[row]), int(before.offsets[row + 1]))
        parts = [part[span].tolist() for part in (before.ids, before.output_counts, before.in_prompt, before.bias)]
        if row > 0 and last[row] in parts[0]:
            parts[1][parts[0].index(last[row])] += 1
        elif row > 0:
            for part, value in zip(parts, (last[row], 1, False, 0.0), strict=True):
                part.append(value)
        for column, part in zip(columns, parts, strict=True):
            column += part
        offsets.append(len(columns[0]))
    after = before._replace(
        offsets=torch.tensor(offsets, dtype=torch.int32),
        ids=torch.tensor(columns[0], dtype=torch.int32),
        output_counts=torch.tensor(columns[1], dtype=torch.int32),
        in_prompt=torch.tensor(columns[2], dtype=torch.bool),
        bias=torch.tensor(columns[3]),
    )
    pending = before._replace(uncounted=uncounted)
    assert_same_bits(penalized(logits, pending), penalized(logits, after))
    torch.testing.assert_close(penalized(logits, pending), penalize_reference(logits, pending))
    assert not torch.equal(penalized(logits, pending), penalized(logits, before))
