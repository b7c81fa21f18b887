"""All kernels of the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardline.kernels.cuda.activations import empty_rows
from shardline.kernels.cuda.stand_ins import StandIns
from shardline.kernels.cuda.triton import (
    activation,
    add,
    attention,
    expert_exchange,
    experts,
    kv_cache,
    linear,
    logprobs,
    norm,
    penalties,
    quantize,
    rope,
    routing,
    row_digests,
    sampling,
    softcap,
)
from shardline.kernels.cuda.triton.launch import use_generation
from shardline.kernels.cuda.weights import RowKernels
from shardline.kernels.host.kernels import HostKernels
from shardline.kernels.pages import PageOrder
from shardline.kernels.tensors import GROUP_SIZE, LatentCache, QuantizedRows
from shardline.kernels.torch import elementwise


class CudaKernels(RowKernels):
    """See `base.Kernels`. All methods are Triton's until some are replaced by torch's."""

    def __init__(self, device: torch.device, capability: str = "") -> None:
        """`capability`: see `Device.capability`; empty: that of a Hopper GPU."""
        super().__init__(device)
        use_generation(capability)
        self.stand_ins = StandIns(device)
        self.replaced: frozenset[str] = frozenset()
        """The methods that are torch's."""

    def replace(self, names: Iterable[str]) -> None:
        """Use torch's kernels for these methods. Layers that have been made keep what they have."""
        self.replaced |= frozenset(names)
        for name in self.replaced:
            setattr(self, name, getattr(self.stand_ins, name))

    quantize_rows = staticmethod(quantize.quantize_rows)
    rms_norm = staticmethod(norm.rms_norm)
    layer_norm = staticmethod(norm.layer_norm)
    add = staticmethod(add.add)
    scale_rows = staticmethod(elementwise.scale_rows)  # there is none of Triton's
    apply_rope = staticmethod(rope.apply_rope)
    activation = staticmethod(activation.activation)
    write_kv = staticmethod(kv_cache.write_kv)
    rope_and_write_kv = staticmethod(rope.rope_and_write_kv)
    paged_attention = staticmethod(attention.paged_attention)
    attention_partials = staticmethod(attention.attention_partials)
    merge_partials = staticmethod(attention.merge_partials)
    linear_heads = staticmethod(linear.linear_heads)
    route_experts = staticmethod(routing.route_experts)
    expert_up = staticmethod(experts.expert_up)
    expert_down = staticmethod(experts.expert_down)
    pack_dispatch = staticmethod(expert_exchange.pack_dispatch)
    expert_slots = staticmethod(expert_exchange.expert_slots)
    combine_slots = staticmethod(expert_exchange.combine_slots)
    softcap = staticmethod(softcap.softcap)
    penalize = staticmethod(penalties.penalize)
    row_digests = staticmethod(row_digests.row_digests)
    logprobs = staticmethod(logprobs.logprobs)
    sample = staticmethod(sampling.sample)

    @staticmethod
    def place_slots(ids: Tensor, places: Tensor, copies: Tensor, first_token: int, out: Tensor) -> None:
        raise AssertionError("deployment.resolve refuses to move experts")

    def activation_empty(self, dtype: torch.dtype, *sizes: int) -> Tensor:
        """torch's allocator keeps the memory between steps, and for a captured graph."""
        return empty_rows(self.device, dtype, *sizes)

    def quantized_empty(self, num_rows: int, in_features: int, dtype: torch.dtype) -> QuantizedRows:
        width = -(-in_features // GROUP_SIZE) * GROUP_SIZE
        return QuantizedRows(
            self.activation_empty(torch.int8, num_rows, width),
            self.activation_empty(torch.float32, num_rows),
            self.activation_empty(torch.int32, num_rows, 0),
            in_features,
            dtype,
        )

    @staticmethod
    def page_order(dtype: torch.dtype) -> PageOrder:
        return "tokens"

    @staticmethod
    def write_latent(latent: Tensor, rope_key: Tensor, cache: LatentCache, slots: Tensor) -> None:
        if isinstance(cache, Tensor):
            kv_cache.write_latent(latent, rope_key, cache, slots)
        else:
            kv_cache.write_quantized_latent(latent, rope_key, *cache, slots)

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
        index = (block_tables, query_starts, context_lens)
        if isinstance(cache, Tensor):
            attention.mla_attention(query_latent, query_rope, cache, *index, out, scale)
        else:
            attention.quantized_mla_attention(query_latent, query_rope, *cache, *index, out, scale)

    def choose_keys(self, *arguments: Tensor) -> None:
        self.stand_ins.choose_keys(*arguments)

    def take_tokens(self, pages: Tensor, slots: Tensor, out: Tensor, word: int) -> None:
        self.stand_ins.take_tokens(pages, slots, out, word)

    def delta_rule(self, *arguments: Any) -> None:
        self.stand_ins.delta_rule(*arguments)

    def mamba(self, *arguments: Any) -> None:
        self.stand_ins.mamba(*arguments)

    def gate_heads(self, x: Tensor, gate: Tensor) -> None:
        self.stand_ins.gate_heads(x, gate)

    @staticmethod
    def mla_partials(*arguments: object) -> None:
        raise AssertionError("deployment.context_parallel refuses it")

    @staticmethod
    def count_exchanged(ids: Tensor, token_bounds: list[int], expert_bounds: Tensor) -> tuple[Tensor, Tensor]:
        return HostKernels.count_exchanged(ids.cpu(), token_bounds, expert_bounds)
