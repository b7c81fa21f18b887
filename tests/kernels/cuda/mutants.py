"""Faults that are planted in the Triton kernels, for the tests of their proof."""

from __future__ import annotations

import importlib
import inspect
from typing import NamedTuple

import pytest
from triton.runtime.interpreter import InterpretedFunction

from shardline.deployment.kernel_cases import KernelCase, Size

_KV: dict[str, Size] = {"kv_heads": 2, "dim": 16, "kv": "", "block": 4}
_VOCABULARY: dict[str, Size] = {"vocabulary": 300}
SIZES: dict[str, dict[str, Size]] = {
    "linear": {"depth": 72, "gate": ""},
    "linear_int8": {"depth": 72, "gate": ""},
    "linear_int4": {"depth": 72, "gate": ""},
    "linear_fp8": {"depth": 72, "gate": ""},
    "linear_w4a16": {"depth": 96, "group": 32},
    "linear_heads": {"depth": 40, "columns": 24},
    "quantize_rows": {"width": 72},
    "rms_norm": {"width": 72, "eps": 1e-6, "offset": 0.0, "quantized": True},
    "layer_norm": {"width": 72, "eps": 1e-6, "bias": True, "quantized": False},
    "add": {"width": 72},
    "activation": {"activation": "silu", "gated": True},
    "write_kv": _KV,
    "rope": {**_KV, "rotary": 12, "interleaved": False},
    "rotate": {"dim": 24, "rotary": 8, "interleaved": True},
    "attention": {**_KV, "block": 16, "group": 2, "window": None, "softcap": None},
    "mla": {"rank": 24, "rotary": 8, "kv": "", "block": 16},
    "route": {
        "experts": 6,
        "chosen": 2,
        "sigmoid": False,
        "normalized": True,
        "groups": 1,
        "top_groups": 1,
        "top2_sum": False,
        "bias": False,
    },
    "experts": {"depth": 40, "inner": 24, "activation": "silu", "gated": True, "held": "plain"},
    "softcap": {**_VOCABULARY, "cap": 3.0},
    "greedy_argmax": _VOCABULARY,
    "mask_tokens": _VOCABULARY,
    "penalize": _VOCABULARY,
    "sample": _VOCABULARY,
    "logprobs": _VOCABULARY,
    "row_digests": _VOCABULARY,
}
"""A small case of each kind."""
CASES = {kernel: KernelCase(kernel, "float32", sizes) for kernel, sizes in SIZES.items()}
DEEP = KernelCase("linear", "bfloat16", {"depth": 256, "gate": ""})
"""Tiles of many rows differ from those of few only in bfloat16, and an order needs several steps along K."""

WINDOWED = KernelCase("attention", "float32", {**SIZES["attention"], "window": 4096})
"""A window is longer than any context of a trial."""
GROUPED = KernelCase(
    "route", "float32", {**SIZES["route"], "experts": 12, "groups": 4, "top_groups": 2, "top2_sum": True}
)


LARGE = KernelCase("sample", "float32", {"vocabulary": 9000})
"""More tokens than are collected before a cut-off is sought."""


class Mutant(NamedTuple):
    """A change of one place in the source of a kernel, or of a function that it calls."""

    kernel: str
    """The kind of case that must notice it."""
    where: str
    old: str
    new: str
    case: KernelCase | None = None
    """Default: that of `CASES`."""


MUTANTS = (
    Mutant("linear", "gemm._chain", "k[None, :] < depth", "k[None, :] < depth - 1"),
    Mutant("linear", "gemm._chain", "* x_stride", "* (x_stride - 1)"),
    Mutant(
        "linear",
        "gemm._chain",
        "range(0, depth, BLOCK_K)",
        "range(0, depth, BLOCK_K) if BLOCK_M == 64 else range(depth - BLOCK_K, -1, -BLOCK_K)",
        DEEP,
    ),
    Mutant("linear", "linear._linear_kernel", "(column[None, :] < num_columns)", "(column[None, :] <= num_columns)"),
    Mutant("linear_int8", "gemm.product", "mask=row_inside, other=0.0", "mask=row_inside & (row > 0), other=0.0"),
    Mutant("linear_int8", "gemm._chain", "k[:, None] < depth", "k[:, None] < depth - 32"),
    Mutant("linear_int4", "gemm._int4_chain", "both & 15", "both & 7"),
    Mutant("linear_int4", "gemm._int4_chain", "x_tile + 64 * pair + 32", "x_tile + 64 * pair + 31"),
    Mutant("linear_fp8", "quantize.as_fp8", "tl.div_rn(448.0", "tl.div_rn(440.0"),
    Mutant("linear_fp8", "gemm._chain", "k[:, None] < depth", "k[:, None] < depth - 1"),
    Mutant("linear_w4a16", "linear_w4a16._linear_w4a16_kernel", "+ 8388608.0)", "+ 8388609.0)"),
    Mutant("linear_w4a16", "linear_w4a16._codes", "both >> 4", "both >> 5"),
    Mutant("linear_heads", "linear._linear_kernel", "matrix * x_head_stride", "0 * x_head_stride"),
    Mutant("linear_heads", "linear._linear_kernel", "matrix * weight_head_stride", "0 * weight_head_stride"),
    Mutant("quantize_rows", "quantize.as_bytes", "x * inverse, 0.0)", "x * inverse + 0.25, 0.0)"),
    Mutant("quantize_rows", "quantize.as_bytes", "magnitude, 127.0", "magnitude, 128.0"),
    Mutant("quantize_rows", "quantize.as_bytes", "tl.max((x != x).to(tl.int32), axis=0)", "0"),
    Mutant("quantize_rows", "quantize.as_bytes", "magnitude >= 1e-36", "magnitude > 0.0"),
    Mutant("quantize_rows", "quantize._quantize_kernel", "row * x_stride", "row * width"),
    Mutant("rms_norm", "norm._norm_kernel", "inside = column < width", "inside = column < width - 1"),
    Mutant("rms_norm", "norm._norm_kernel", "row * residual_stride", "0 * residual_stride"),
    Mutant("rms_norm", "norm._norm_kernel", "row % per_token * head_stride", "0 * head_stride"),
    Mutant("rms_norm", "norm.inverse_rms", "mean + eps", "mean"),
    Mutant("layer_norm", "norm._norm_kernel", "variance + eps", "variance"),
    Mutant("layer_norm", "norm._norm_kernel", "x - mean, 0.0)", "x - mean, 1.0)"),
    Mutant("layer_norm", "norm._norm_kernel", "bias_ptr + column,", "bias_ptr + column + 1,"),
    Mutant("add", "add._add_kernel", "element_ty), mask=place < count", "element_ty), mask=place <= count"),
    Mutant("add", "add._add_kernel", "element_ty), mask=place < count", "element_ty), mask=place < count - 1"),
    Mutant("activation", "activation._activation_kernel", "x_stride + width + column", "x_stride + width - 1 + column"),
    Mutant("activation", "activation._activation_kernel", "inside = column < width", "inside = column < width - 1"),
    Mutant("write_kv", "kv_cache._write_kv_kernel", "+ slot % block_size", "+ (slot + 1) % block_size"),
    Mutant("write_kv", "kv_cache._write_kv_kernel", "token * value_stride", "token * key_stride"),
    Mutant("write_kv", "kv_cache._store_head", "values, mask=column < DIM", "values, mask=column < DIM - 1"),
    Mutant("rope", "rope._rotated", "tl.fma(second, cosine, first * sine)", "tl.fma(second, cosine, -(first * sine))"),
    Mutant("rope", "rope._rope_and_write_kernel", "head * VALUE_DIM + column, mask=kept", "column, mask=kept"),
    Mutant("rope", "rope._rope_and_write_kernel", "(slot >= 0) &", "(slot >= -1) &"),
    Mutant("rotate", "rope._rope_kernel", "(2 * HALF)", "(2 * HALF - 1)"),
    Mutant("rotate", "rope._rotated", "(pair < HALF)", "(pair < HALF - 1)"),
    Mutant("attention", "attention_kernel.attention_kernel", "<= position[:, None])", "< position[:, None])"),
    Mutant("attention", "attention_kernel.attention_kernel", "tl.min(position, axis=0) + 1\n", "end_key\n"),
    Mutant("attention", "attention_kernel.attention_kernel", "whole_keys // BLOCK", "(whole_keys + 1) // BLOCK"),
    Mutant("attention", "attention_kernel.attention_kernel", "- window)", "- window - 1)", WINDOWED),
    Mutant("attention", "attention_kernel.attention_kernel", 'larger == float("-inf")', "larger != larger", WINDOWED),
    Mutant("attention", "attention_kernel._merge", "total * keep)", "total)"),
    Mutant("attention", "attention_kernel.attention_kernel", "* query_stride", "* (query_stride - 1)"),
    Mutant("attention", "attention_kernel.merge_ranks_kernel", "split % num_ranks * num_splits", "0 * num_splits"),
    Mutant(
        "attention",
        "attention_kernel.merge_kernel",
        "range(first_split, tl.cdiv(position + 1, SPLIT))",
        "range(tl.cdiv(position + 1, SPLIT) - 1, first_split - 1, -1)",
    ),
    Mutant("attention", "attention_kernel.attention_kernel", "part * part_step", "part"),
    Mutant("attention", "attention_kernel.merge_kernel", "cdiv(position + 1, SPLIT)", "cdiv(position + 2, SPLIT)"),
    Mutant("attention", "attention_kernel.merge_kernel", "position - window + 1", "position - window + 2", WINDOWED),
    Mutant("mla", "attention_kernel.attention_kernel", "* rope_head_stride", "* (rope_head_stride - 1)"),
    Mutant(
        "mla", "kv_cache._write_latent_kernel", "row + RANK + column, rope_key", "row + RANK - 1 + column, rope_key"
    ),
    Mutant("route", "routing._route_kernel", "total + 1e-20", "total + 1.0"),
    Mutant("route", "routing._route_kernel", "counts_ptr + chosen,", "counts_ptr + 0 * chosen,"),
    Mutant(
        "route",
        "routing._route_kernel",
        'member[None, :] == first[:, None], float("-inf")',
        'member[None, :] < 0, float("-inf")',
        GROUPED,
    ),
    Mutant("route", "routing._route_kernel", "tl.load(slots_ptr + token) < 0", "tl.load(slots_ptr) < 0"),
    Mutant("route", "routing._route_kernel", "is_slot & (chosen >= 0)", "is_slot"),
    Mutant("route", "routing._route_kernel", "eligible, NEVER)", "eligible, eligible)"),
    Mutant("experts", "experts._grouped_kernel", "expert * expert_stride", "0 * expert_stride"),
    Mutant("experts", "experts._combine_kernel", "weights_ptr + place)", "weights_ptr + token * CHOSEN)"),
    Mutant("softcap", "softcap._softcap_kernel", "cap * tanh", "tanh"),
    Mutant("softcap", "softcap.tanh", "-1.0 / 3", "1.0 / 3"),
    Mutant("greedy_argmax", "sampling.argmax_of_row", "begin + lane < vocab_size", "begin + lane < vocab_size - 1"),
    Mutant(
        "greedy_argmax", "sampling.argmax_of_row", "tl.min(tl.where(largest == top, best, vocab_size)", "tl.max(best"
    ),
    Mutant("greedy_argmax", "sampling._greedy_kernel", "row * stride", "row * vocab_size"),
    Mutant("mask_tokens", "mask._mask_kernel", "token // 32", "token // 31"),
    Mutant("mask_tokens", "mask._mask_kernel", "tl.load(rows_ptr + index)", "index"),
    Mutant("mask_tokens", "mask._mask_kernel", "(token < width)", "(token < width - 1)"),
    Mutant("penalize", "penalties._penalized", "- presence", "- 0.0 * presence"),
    Mutant("penalize", "penalties._penalize_kernel", "(num_found == 0)", "(num_found >= 0)"),
    Mutant("penalize", "penalties._penalize_kernel", "(token < vocab_size)", "(token <= vocab_size)"),
    Mutant("penalize", "penalties._penalize_kernel", "(uncounted < vocab_size)", "(uncounted <= vocab_size)"),
    Mutant("penalize", "penalties._penalize_kernel", "end, BLOCK)", "end - 1, BLOCK)"),
    Mutant("sample", "sampling._uniform", ">> 11", ">> 12"),
    Mutant("sample", "sampling._sample_kernel", "temperature < GREEDY_BELOW", "temperature <= 1.0"),
    Mutant("sample", "sampling._weights", "weight >= min_p", "weight >= 0"),
    Mutant("sample", "sampling._weights", "rank >= floor", "rank > floor"),
    Mutant("sample", "sampling.rank_of", "logit + 0.0", "logit"),
    Mutant("sample", "sampling._last_of_equals", "< missing", "<= missing"),
    Mutant("sample", "sampling._uniform", "position >> 32", "position >> 31"),
    Mutant("sample", "sampling._narrow", "number <= MOST, number, 0", "number <= 2 * MOST, number, 0", LARGE),
    Mutant("logprobs", "logprobs._logprobs_kernel", "num_larger + 1", "num_larger"),
    Mutant("logprobs", "logprobs._logprobs_kernel", "tl.log(total)", "tl.log(total + 1.0)"),
    Mutant("logprobs", "logprobs._logprobs_kernel", "* stride", "* vocab_size"),
    Mutant("row_digests", "row_digests._digest_kernel", "row * stride", "row * width"),
    Mutant("row_digests", "row_digests._digest_kernel", ">> 30", ">> 29"),
    Mutant("row_digests", "row_digests._digest_kernel", "tl.where(column < width,", "tl.where(column < width - 1,"),
)


def plant(patch: pytest.MonkeyPatch, where: str, old: str, new: str) -> None:
    """Change `old` to `new` in the source of a function of `kernels.cuda.triton`, which the interpreter then runs."""
    module, _, name = where.partition(".")
    function = getattr(importlib.import_module(f"shardline.kernels.cuda.triton.{module}"), name)
    assert isinstance(function, InterpretedFunction)
    lines, _ = inspect.getsourcelines(function.fn)
    assert old in "".join(lines), f"{where} has no {old!r}"
    rewriter = function.rewriter
    rewriter.filename, rewriter.def_file_lineno = rewriter._get_jit_fn_file_line()
    rewriter.def_lineno = rewriter._find_def(lines)
    source = rewriter._prepare_source(lines).replace(old, new, 1)
    changed = rewriter._compile_and_exec(rewriter._transform_ast(source))
    patch.setitem(InterpretedFunction.rewritten_fn, function.fn, changed)
