"""The kernels of `shardline._cpu` for tensors on a GPU: functions of the same names and arguments, written in Triton.

The numerics are the CPU's (see docs/architecture.md), the bits are not: they belong to the kernel path. Importing this
package needs Triton, which comes with torch where there is a GPU.
"""

from __future__ import annotations

from shardline.runtime.ops.triton.activation import activation
from shardline.runtime.ops.triton.add import add
from shardline.runtime.ops.triton.attention import mla_attention, paged_attention, quantized_mla_attention
from shardline.runtime.ops.triton.expert_exchange import combine_slots, expert_slots, pack_dispatch
from shardline.runtime.ops.triton.experts import expert_down, expert_up
from shardline.runtime.ops.triton.gather import collect_columns, put_columns
from shardline.runtime.ops.triton.kv_cache import write_kv, write_latent, write_quantized_latent
from shardline.runtime.ops.triton.linear import (
    add_linear,
    linear,
    linear_fp8,
    linear_heads,
    linear_int4,
    linear_int8,
    runs_of_row,
)
from shardline.runtime.ops.triton.linear_w4a16 import linear_w4a16
from shardline.runtime.ops.triton.logprobs import logprobs
from shardline.runtime.ops.triton.norm import layer_norm, rms_norm
from shardline.runtime.ops.triton.penalties import penalize
from shardline.runtime.ops.triton.qkv_linear import qkv_linear
from shardline.runtime.ops.triton.quantize import quantize_rows, quantize_rows_fp8
from shardline.runtime.ops.triton.rope import apply_rope, rope_and_write_kv
from shardline.runtime.ops.triton.routing import route_experts
from shardline.runtime.ops.triton.sampling import greedy_argmax, sample
from shardline.runtime.ops.triton.softcap import softcap
from shardline.runtime.ops.triton.storage import activation_empty

__all__ = [
    "activation",
    "activation_empty",
    "add",
    "add_linear",
    "apply_rope",
    "collect_columns",
    "combine_slots",
    "expert_down",
    "expert_slots",
    "expert_up",
    "greedy_argmax",
    "layer_norm",
    "linear",
    "linear_fp8",
    "linear_heads",
    "linear_int4",
    "linear_int8",
    "linear_w4a16",
    "logprobs",
    "mla_attention",
    "pack_dispatch",
    "paged_attention",
    "penalize",
    "put_columns",
    "qkv_linear",
    "quantize_rows",
    "quantize_rows_fp8",
    "quantized_mla_attention",
    "rms_norm",
    "rope_and_write_kv",
    "route_experts",
    "runs_of_row",
    "sample",
    "softcap",
    "write_kv",
    "write_latent",
    "write_quantized_latent",
]
