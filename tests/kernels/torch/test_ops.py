"""The tests of the ops and of the weight formats, with torch's kernels in place of the host's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from shardline.kernels.host.kernels import HostKernels
from shardline.kernels.torch import attention
from shardline.kernels.torch.kv_cache import Kept
from shardline.kernels.torch.torch_kernels import TorchKernels
from shardline.runtime.ops.adapters.low_rank import expert_low_rank, low_rank
from shardline.weights.base import weight_format
from tests.runtime.ops import test_activation, test_low_rank, test_norm, test_output_factors, test_scale
from tests.runtime.ops.attention import (
    test_chosen_keys,
    test_delta_rule,
    test_kv_cache,
    test_latent,
    test_linear_heads,
    test_mamba,
    test_paged,
    test_partials,
    test_rope,
)
from tests.runtime.ops.helpers import sorted_slots
from tests.runtime.ops.moe import test_experts, test_routing
from tests.runtime.ops.sampling import test_logprobs, test_mask, test_penalties, test_row_digests, test_sample
from tests.weights import test_contract

KERNELS = TorchKernels(torch.device("cpu"))
TESTS: dict[Any, tuple[str, ...]] = {
    test_activation: (
        "over_the_whole_range",
        "special_values",
        "gated",
        "an_element_does_not_depend_on_its_place",
        "softcap",
    ),
    test_norm: (
        "rms_norm",
        "layer_norm",
        "fused_addition_is_the_addition_then_the_norm",
        "rows_that_quantize_to_nothing",
    ),
    test_scale: ("rows_times_factors",),
    test_low_rank: (
        "against_torch",
        "a_row_has_the_same_bits_in_every_batch",
        "columns_have_the_same_bits_on_every_rank",
        "rows_of_experts_are_those_of_linears",
    ),
    test_output_factors: ("against_torch", "a_row_has_the_same_bits_in_every_part"),
    test_rope: ("matches_reference", "slices_of_a_fused_projection_and_neighbours"),
    test_kv_cache: ("keys_and_values_lie_where_the_reference_puts_them",),
    test_linear_heads: ("matches_reference", "rows_and_heads_do_not_notice_their_neighbours"),
    test_chosen_keys: (
        "matches_reference",
        "a_row_chooses_alike_in_every_batch",
        "of_equal_scores_the_earlier_token_is_chosen",
        "a_product_that_is_no_number_counts_as_zero",
    ),
    test_delta_rule: (
        "matches_reference",
        "a_sequence_notices_neither_steps_nor_neighbours",
        "heads_do_not_notice_each_other",
    ),
    test_mamba: (
        "matches_reference",
        "a_sequence_notices_neither_steps_nor_neighbours",
        "groups_do_not_notice_each_other",
    ),
    test_paged: (
        "matches_reference",
        "sinks_and_chunks",
        "in_bf16_no_further_from_exact_than_torch",
        "chunks_and_decode_have_the_bits_of_the_whole",
        "neighbours_blocks_and_threads_do_not_matter",
        "a_shard_of_the_heads_has_the_bits_of_the_whole",
        "value_heads_may_be_narrower",
        "write_kv",
        "write_kv_as_bytes",
        "every_e4m3_number_is_read_exactly",
    ),
    test_latent: (
        "matches_reference",
        "a_shard_of_the_heads_has_the_bits_of_the_whole",
        "write_latent",
    ),
    test_partials: (
        "merged_parts_are_the_attention_of_one_rank",
        "merged_parts_of_latents_are_the_attention_of_one_rank",
        "parts_match_their_reference",
        "parts_of_latents_match_their_reference",
    ),
    test_experts: (
        "up_matches_reference",
        "down_matches_reference",
        "rows_have_the_bits_of_one_linear",
        "a_token_does_not_depend_on_the_batch",
        "whole_experts_on_ranks_have_the_bits_of_one_rank",
    ),
    test_routing: ("matches_reference", "ties_go_to_the_lowest_id", "counts_grow"),
    test_logprobs: ("matches_reference", "banned_tokens_and_an_exhausted_vocabulary"),
    test_mask: ("matches_reference", "only_the_named_rows_change"),
    test_penalties: ("matches_reference", "nothing_to_change"),
    test_row_digests: ("digests_are_those_of_the_reference", "every_bit_and_every_place_counts"),
    test_sample: (
        "greedy_takes_the_lowest_id_on_ties",
        "greedy_ignores_nan_and_survives_rows_of_nothing",
        "a_large_vocabulary",
        "a_row_does_not_depend_on_the_batch",
    ),
    test_contract: (
        "parts_are_packed_like_the_whole",
        "an_output_depends_on_its_row_of_x_only",
        "an_output_depends_on_its_row_of_the_weight_only",
        "products_are_near_those_of_the_dense_weight",
        "rows_of_experts_have_the_bits_of_one_linear",
        "the_best_output_is_the_first_largest_of_all",
    ),
}
for _module, _names in TESTS.items():
    for _name in _names:
        globals()[f"test_{_module.__name__.rpartition('test_')[2]}__{_name}"] = getattr(_module, f"test_{_name}")


@pytest.mark.parametrize("name", ["plain", "int8", "int8_fast", "int4_fast"])
@pytest.mark.parametrize(("m", "k", "n"), [(3, 77, 100), (6, 1, 1), (13, 4200, 65), (250, 130, 190)])
def test_products_are_those_of_the_oracle(name, dtype, rng, m, k, n):
    """Those of fp8 round the unpacked weight too."""
    for with_bias in (False, True):
        test_contract.test_products_are_those_of_the_oracle(name, weight_format(name), dtype, rng, m, k, n, with_bias)


def test_long_prompts_are_computed_in_parts(rng, monkeypatch):
    monkeypatch.setattr(attention, "_MOST_ELEMENTS", 1 << 14)
    test_paged.test_matches_reference("torch", None, torch.float32, rng, 4, 2, 64, 20, None)
    test_paged.test_chunks_and_decode_have_the_bits_of_the_whole(None, torch.float32, rng, None)
    test_latent.test_chunks_and_decode_have_the_bits_of_the_whole(torch.float32, rng, 5, None)


def test_partials_of_a_long_prompt_are_merged_a_part_at_a_time(rng, monkeypatch):
    """They are as large as the outputs, for each split of the keys. Sinks are those of the part's rows."""
    monkeypatch.setattr(attention, "_MOST_ELEMENTS", 1 << 14)
    order: list[str] = []

    def note(name: str, function: Callable[..., Any]) -> None:
        def noted(*rest: Any) -> Any:
            order.append(name)
            return function(*rest)

        monkeypatch.setattr(attention, name, noted)

    note("_attend_part", attention._attend_part)
    note("_merged", attention._merged)
    test_paged.test_sinks_and_chunks(None, rng, None, False)
    order.clear()
    test_paged.attend([(test_paged.random_sequence(rng, 1100, torch.float32, dim=32), 0, 1100)])
    assert len(order) > 2
    assert order == ["_attend_part", "_merged"] * (len(order) // 2)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("num_elements", [1 << 14, 8 << 20])
@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.float32, None), (torch.float32, torch.int8), (torch.bfloat16, None)]
)
def test_fast_numerics_attend_with_the_librarys_attention(rng, dtype, stored, window, num_elements, monkeypatch):
    monkeypatch.setattr(KERNELS, "is_exact", False)
    monkeypatch.setattr(attention, "_MOST_ELEMENTS", num_elements)
    monkeypatch.setattr(attention, "_attend", None)  # tiles
    # The library rounds weights to bf16, as processors with bf16 products do here.
    test_paged.test_matches_reference("avx512_bf16", stored, dtype, rng, 4, 2, 64, window, None)


def test_fast_numerics_activate_as_exact_ones_do(rng, dtype, monkeypatch):
    x, outs = 5 * torch.randn(3, 200, generator=rng).to(dtype), []
    for exact in (True, False):
        monkeypatch.setattr(KERNELS, "is_exact", exact)
        outs.append(torch.empty(3, 100, dtype=dtype))
        KERNELS.activation(x, outs[-1], "silu", True)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-6)


def test_what_a_step_computed_is_held_as_long_as_its_tables():
    kept, slots = Kept(), torch.arange(3)
    calls = [kept.value_of((slots,), None, lambda: torch.ones(2)) for _ in range(2)]
    assert calls[0] is calls[1]
    value = weakref.ref(calls.pop())
    calls.clear()
    assert value() is not None
    del slots
    assert value() is None


def _replaced(value: object) -> object:
    """The kernels, or a call of them, for those of the host."""
    if isinstance(value, HostKernels):
        return KERNELS
    if isinstance(value, partial) and any(isinstance(argument, HostKernels) for argument in value.args):
        return partial(value.func, *map(_replaced, value.args), **value.keywords)
    return value


def _in_one(own: Any, bias: Tensor | None, scaled: bool) -> Tensor:
    """What kernels of adapters return, as the host's do: with the bias."""
    own_bias = 0.0 if bias is None else bias.float()
    if not scaled:
        return own.added if bias is None else own.added + own_bias
    return torch.stack([own.added if bias is None else own.added + own_bias * own.factors, own.factors], 1)


def _low_rank(*arguments: Any, scaled: bool = False) -> Tensor:
    bias = arguments[4] if len(arguments) > 4 else None
    return _in_one(low_rank(*arguments, scaled=scaled), bias, scaled)


def _expert_low_rank(*arguments: Any, first_expert: int, scaled: bool, **form: Any) -> Tensor:
    own: Any = expert_low_rank(*arguments, first_expert=first_expert, scaled=scaled, **form)
    ids, num_experts, bias = arguments[2], arguments[5], arguments[6]
    experts = sorted_slots(ids, first_expert, num_experts)[1]
    rows = _in_one(own, None if bias is None else bias[experts], scaled)
    rows = rows.view(len(experts), 1 + scaled, own.added.shape[1])
    return torch.cat([rows, rows.new_full((ids.numel() - len(rows), *rows.shape[1:]), torch.nan)])


@pytest.fixture(autouse=True, scope="module")
def torch_kernels() -> Iterator[None]:
    """In the modules of the tests, and in the defaults of their functions."""
    with pytest.MonkeyPatch.context() as patch:
        for module in TESTS:
            for name, value in list(vars(module).items()):
                if (replaced := _replaced(value)) is not value:
                    patch.setattr(module, name, replaced)
                if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                    patch.setattr(
                        value, "__defaults__", value.__defaults__ and tuple(map(_replaced, value.__defaults__))
                    )
                    named = value.__kwdefaults__ and {key: _replaced(one) for key, one in value.__kwdefaults__.items()}
                    patch.setattr(value, "__kwdefaults__", named)
        patch.setattr(test_low_rank, "low_rank", _low_rank)
        patch.setattr(test_low_rank, "expert_low_rank", _expert_low_rank)
        yield
