"""The CPU's kernels: those of `shardline._cpu`, with adapters where arguments differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardline import _cpu
from shardline.kernels.host import low_rank as adapters
from shardline.kernels.host.fp8_panels import Fp8PanelKernels
from shardline.kernels.pages import PageOrder
from shardline.kernels.tensors import GROUP_SIZE, LatentCache, QuantizedRows


class HostKernels(Fp8PanelKernels):
    """See `base.Kernels`."""

    activation_empty = staticmethod(_cpu.activation_empty)
    quantize_rows = staticmethod(_cpu.quantize_rows)
    quantize_rotated = staticmethod(_cpu.quantize_rotated)
    rms_norm = staticmethod(_cpu.rms_norm)
    layer_norm = staticmethod(_cpu.layer_norm)
    add = staticmethod(_cpu.add)
    low_rank_empty = staticmethod(adapters.low_rank_empty)
    low_rank = staticmethod(adapters.low_rank)
    expert_low_rank = staticmethod(adapters.expert_low_rank)
    apply_rope = staticmethod(_cpu.apply_rope)
    activation = staticmethod(_cpu.activation)
    scale_rows = staticmethod(_cpu.scale_rows)
    write_kv = staticmethod(_cpu.write_kv)
    rope_and_write_kv = staticmethod(_cpu.rope_and_write_kv)
    paged_attention = staticmethod(_cpu.paged_attention)
    attention_partials = staticmethod(_cpu.attention_partials)
    merge_partials = staticmethod(_cpu.merge_partials)
    linear_heads = staticmethod(_cpu.linear_heads)
    choose_keys = staticmethod(_cpu.choose_keys)
    delta_rule = staticmethod(_cpu.delta_rule)
    gate_heads = staticmethod(_cpu.gate_heads)
    mamba = staticmethod(_cpu.mamba)
    take_tokens = staticmethod(_cpu.take_tokens)
    expert_up = staticmethod(_cpu.expert_up)
    expert_down = staticmethod(_cpu.expert_down)
    place_slots = staticmethod(_cpu.place_slots)
    pack_dispatch = staticmethod(_cpu.pack_dispatch)
    expert_slots = staticmethod(_cpu.expert_slots)
    combine_slots = staticmethod(_cpu.combine_slots)
    softcap = staticmethod(_cpu.softcap)
    mask_tokens = staticmethod(_cpu.mask_tokens)
    greedy_argmax = staticmethod(_cpu.greedy_argmax)
    row_digests = staticmethod(_cpu.row_digests)
    logprobs = staticmethod(_cpu.logprobs)
    sample = staticmethod(_cpu.sample)

    @staticmethod
    def quantized_empty(num_rows: int, in_features: int, dtype: torch.dtype) -> QuantizedRows:
        num_groups = -(-in_features // GROUP_SIZE)
        return QuantizedRows(
            _cpu.activation_empty(torch.int8, num_rows, num_groups * GROUP_SIZE),
            _cpu.activation_empty(torch.float32, num_rows),
            _cpu.activation_empty(torch.int32, num_rows, 1 + num_groups),
            in_features,
            dtype,
        )

    @staticmethod
    def count_exchanged(ids: Tensor, token_bounds: list[int], expert_bounds: Tensor) -> tuple[Tensor, Tensor]:
        size = expert_bounds.shape[0] - 1
        tokens, slots = (_cpu.activation_empty(torch.int64, size, size) for _ in range(2))
        _cpu.count_exchanged(ids, token_bounds, expert_bounds, tokens, slots)
        return tokens, slots

    @staticmethod
    def page_order(dtype: torch.dtype) -> PageOrder:
        return "pairs" if dtype == torch.bfloat16 and _cpu.multiplies_pairs() else "words"

    @staticmethod
    def write_latent(latent: Tensor, rope_key: Tensor, cache: LatentCache, slots: Tensor) -> None:
        _cpu.write_latent(latent, rope_key, *_latent_parts(cache), slots)

    @staticmethod
    def mla_attention(
        query_latent: Tensor,
        query_rope: Tensor,
        cache: LatentCache,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        out: Tensor,
        scale: float,
    ) -> None:
        parts = _latent_parts(cache)
        _cpu.mla_attention(query_latent, query_rope, *parts, block_tables, query_starts, context_lens, out, scale)

    @staticmethod
    def mla_partials(query_latent: Tensor, query_rope: Tensor, cache: LatentCache, *arguments: Any) -> None:
        _cpu.mla_partials(query_latent, query_rope, *_latent_parts(cache), *arguments)

    @staticmethod
    def route_experts(*arguments: Any) -> None:
        """Drops the last argument, since host steps have no padding."""
        _cpu.route_experts(*arguments[:-1])

    @staticmethod
    def penalize(*arguments: Any) -> None:
        assert arguments[-1] is None, "the host knows every token"
        _cpu.penalize(*arguments[:-1])


def _latent_parts(cache: LatentCache) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The latents, and beside quantized ones the rotated parts and the scales."""
    return (cache, None, None) if isinstance(cache, Tensor) else cache
