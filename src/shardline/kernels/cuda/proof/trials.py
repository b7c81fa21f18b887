"""The trials of each kind of `KernelCase`, and the methods of the GPU's kernels for which it speaks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardline.deployment.kernel_cases import KernelCase
from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.kernels.cuda.proof import attention, products, rows
from shardline.kernels.cuda.proof.check import MakeTrials, Memory, examine

TRIALS: Mapping[str, MakeTrials] = {
    "linear": products.linear,
    "linear_int8": products.scaled("int8"),
    "linear_int4": products.scaled("int4"),
    "linear_fp8": products.fp8,
    "linear_w4a16": products.w4a16,
    "linear_heads": products.linear_heads,
    "quantize_rows": rows.quantize_rows,
    "rms_norm": rows.norm(rms=True),
    "layer_norm": rows.norm(rms=False),
    "add": rows.add,
    "activation": rows.activation,
    "write_kv": attention.write_kv,
    "rope": attention.rope,
    "rotate": rows.rotate,
    "attention": attention.attention,
    "mla": attention.mla,
    "route": rows.route,
    "experts": products.experts,
    "softcap": rows.in_place("softcap", lambda memory, sizes, *shape: lambda kernels, rows: (sizes["cap"],)),
    "greedy_argmax": rows.greedy_argmax,
    "mask_tokens": rows.in_place("mask_tokens", rows.mask_arguments),
    "penalize": rows.in_place("penalize", rows.penalties),
    "sample": rows.sample,
    "logprobs": rows.logprobs,
    "row_digests": rows.row_digests,
}
"""By the kind of case."""

OPS: Mapping[str, frozenset[str]] = {
    **{name: frozenset({name}) for name in TRIALS},
    "write_kv": frozenset({"write_kv", "rope_and_write_kv"}),
    "rope": frozenset({"apply_rope", "write_kv", "rope_and_write_kv"}),
    "rotate": frozenset({"apply_rope"}),
    "attention": frozenset({"paged_attention", "attention_partials", "merge_partials"}),
    "mla": frozenset({"mla_attention", "write_latent"}),
    "route": frozenset({"route_experts"}),
    "experts": frozenset({"expert_up", "expert_down", "expert_slots", "combine_slots"}),
}
"""The methods of `CudaKernels` that a case speaks for. They are torch's together if it fails: some read what others of
them write, or must have their bits."""


def problem_of(case: KernelCase, own: CudaKernels) -> str:
    """What is wrong with the kernels of a case; empty: they are proved."""
    memory = Memory(own.device)
    for trial in TRIALS[case.kernel](memory, own, getattr(torch, case.dtype), case.sizes):
        if problem := examine(trial, memory, own, own.stand_ins):
            return problem
    return ""
