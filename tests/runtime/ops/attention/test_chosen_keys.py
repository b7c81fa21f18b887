"""Which keys an indexer chooses, and the pages of what is chosen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardline.kernels.pages import PageOrder, pages_of, tokens_of
from shardline.kernels.tensors import QuantizedLatents
from shardline.kernels.torch.torch_kernels import TorchKernels
from shardline.runtime.ops.attention.chosen_keys import choose_keys, choose_keys_reference, chosen_pages
from tests.runtime.ops.helpers import KERNELS

pytestmark = pytest.mark.usefixtures("isa")

BLOCK, BLOCKS = 16, 90


def random_rows(
    rng: torch.Generator, dtype: torch.dtype, heads: int, dim: int, contexts: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The arguments of `choose_keys` for rows that see so many tokens, of two sequences."""
    tables = torch.stack([torch.randperm(BLOCKS, generator=rng)[:80] for _ in range(2)]).int()
    rows = len(contexts)
    return (
        torch.randn(rows, heads, dim, generator=rng).to(dtype),
        torch.randn(rows, heads, generator=rng),
        torch.randn(BLOCKS, BLOCK, dim, generator=rng).to(dtype),
        tables,
        torch.arange(rows, dtype=torch.int32) % 2,
        torch.tensor(contexts, dtype=torch.int32),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim", "top_k"), [(64, 128, 20), (12, 20, 1), (5, 7, 64), (33, 16, 17)])
def test_matches_reference(dtype: torch.dtype, heads: int, dim: int, top_k: int) -> None:
    rng = torch.Generator().manual_seed(heads)
    arguments = random_rows(rng, dtype, heads, dim, [64, 65, 66, 67, 600, 1280])
    slots = choose_keys(KERNELS, *arguments, top_k)
    expected, scores = choose_keys_reference(*arguments, top_k)
    for row, all_scores in enumerate(scores):
        if not torch.equal(slots[row], expected[row]):  # rounding may decide between close scores
            tables, sequences = arguments[3], arguments[4]
            places = torch.arange(len(all_scores))
            seen = tables[sequences[row], places // BLOCK].long() * BLOCK + places % BLOCK
            chosen = torch.isin(seen, slots[row])
            assert chosen.sum() == top_k
            assert all_scores[chosen].min() >= all_scores[~chosen].max() - 1e-4 * all_scores.abs().max()
            assert torch.equal(slots[row], seen[chosen]), "in the order of positions"


def test_a_row_chooses_alike_in_every_batch() -> None:
    rng = torch.Generator().manual_seed(1)
    query, weights, keys, tables, sequences, contexts = random_rows(
        rng, torch.bfloat16, 16, 32, [40, 700, 513, 1100] * 6
    )
    weights = weights.round()  # many close scores
    together = choose_keys(KERNELS, query, weights, keys, tables, sequences, contexts, 30)
    for row in range(len(query)):
        one = slice(row, row + 1)
        alone = choose_keys(KERNELS, query[one], weights[one], keys, tables, sequences[one], contexts[one], 30)
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_of_equal_scores_the_earlier_token_is_chosen(value: float) -> None:
    """Also where all are zero, since no product is positive, or none is a number."""
    query, weights = torch.full((1, 3, 8), value), torch.ones(1, 3)
    keys, tables = torch.ones(4, BLOCK, 8), torch.tensor([[2, 0, 3]], dtype=torch.int32)
    sequences, contexts = torch.zeros(1, dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    slots = choose_keys(KERNELS, query, weights, keys, tables, sequences, contexts, 18)
    assert slots[0].tolist() == [*range(32, 48), 0, 1]


def test_a_product_that_is_no_number_counts_as_zero() -> None:
    query, weights = torch.ones(1, 3, 8), torch.ones(1, 3)
    keys, tables = torch.ones(4, BLOCK, 8), torch.tensor([[0, 1]], dtype=torch.int32)
    keys[0, 5] = torch.nan
    keys[1, 0] = -1.0
    sequences, contexts = torch.zeros(1, dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    slots = choose_keys(KERNELS, query, weights, keys, tables, sequences, contexts, 19)
    assert slots[0].tolist() == [*range(16), *range(17, 20)], "of two that count as zero, the earlier one"


@pytest.mark.parametrize("order", ["tokens", "words", "pairs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("count", [16, 21])
def test_chosen_pages_hold_the_latents_in_order(order: PageOrder, dtype: torch.dtype, count: int) -> None:
    if order == "pairs" and dtype == torch.float32:
        return  # its pages have no pairs
    kernels = TorchKernels(torch.device("cpu")) if order == "tokens" else KERNELS
    values = torch.randint(-90, 90, (5, 2 * BLOCK, 24)).to(torch.float32).to(dtype)
    slots = torch.randint(0, 10 * BLOCK, (3, count))
    pages = pages_of(values, "keys", order)
    if dtype.itemsize > 1:
        found = chosen_pages(kernels, pages, slots, order)
        assert isinstance(found, Tensor)
    else:
        ropes, scales = torch.randn(5, 2 * BLOCK, 8).bfloat16(), torch.randn(5, 2 * BLOCK)
        cache = chosen_pages(kernels, QuantizedLatents(pages, pages_of(ropes, "keys", order), scales), slots, order)
        assert isinstance(cache, QuantizedLatents)
        found = cache.values
        rotated = tokens_of(cache.rope_keys, "keys", order).view(3, -1, 8)[:, :count]
        assert torch.equal(rotated, ropes.view(-1, 8)[slots])
        assert torch.equal(cache.scales.view(3, -1)[:, :count], scales.view(-1)[slots])
    tokens = tokens_of(found, "keys", order).view(3, -1, 24)[:, :count]
    assert torch.equal(tokens.float(), values.float().view(-1, 24)[slots])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"contexts": [9]}, "fewer keys than are chosen"),
        ({"contexts": [80 * BLOCK + 1]}, "more than its block table"),
        ({"sequences": [2]}, "its block table"),
        ({"tables": BLOCKS}, "a block outside the KV cache"),
    ],
)
def test_wrong_rows_are_refused(change: dict[str, object], says: str) -> None:
    rng = torch.Generator().manual_seed(2)
    query, weights, keys, tables, sequences, contexts = random_rows(rng, torch.float32, 3, 8, [100])
    if "tables" in change:
        tables[0, 3] = BLOCKS
    sequences = torch.tensor(change.get("sequences", [0]), dtype=torch.int32)
    contexts = torch.tensor(change.get("contexts", [100]), dtype=torch.int32)
    with pytest.raises(ValueError, match=says):
        choose_keys(KERNELS, query, weights, keys, tables, sequences, contexts, 10)
