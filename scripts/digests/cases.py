"""The recorded cases: checkpoints with engine options. This module also makes the checkpoints."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """A checkpoint with engine options, and the requests to run."""

    group: str
    """The name of the process that runs the case. It begins with "cpu", "triton", "llm" or "isa:<name>"."""
    checkpoint: str
    options: dict[str, Any] = field(default_factory=dict)
    requests: str = "mixed"
    """A key of `REQUESTS`."""

    @property
    def name(self) -> str:
        room = self.group.split("/")[0]
        return " ".join([room, self.checkpoint, *(f"{key}={value}" for key, value in self.options.items())])


_FORMATS = [(dtype, weights) for dtype in ("float32", "bfloat16") for weights in ("none", "int8", "int4_fast")]
_LAYOUT_FORMATS = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("float32", "int4_fast"))
PACKED_MODELS = ("llama-gptq", "llama-awq", "mixtral-gptq", "mixtral-awq")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "fast": {"tensor_parallel_size": 2, "numerics": "fast"},
    "tp3": {"tensor_parallel_size": 3},
    "tp2 pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tp2 ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "dp2 ep": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "tp2 dp2 ep": {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
}

GPU_CASES: list[tuple[str, str, str, str]] = [
    ("llama", "float32", "none", "auto"),
    ("llama", "bfloat16", "none", "auto"),
    ("llama", "float32", "int8", "auto"),
    ("llama", "bfloat16", "int4_fast", "int8"),
    ("llama", "float32", "fp8", "auto"),
    ("llama-gptq", "float32", "packed", "auto"),
    ("llama-awq", "bfloat16", "packed", "auto"),
    ("mixtral-gptq", "float32", "packed", "auto"),
    ("mistral", "float32", "none", "int8"),
    ("mistral", "float32", "none", "fp8"),
    ("qwen2", "bfloat16", "none", "auto"),
    ("qwen3", "bfloat16", "int8", "auto"),
    ("gemma", "bfloat16", "none", "auto"),
    ("gemma2", "float32", "none", "auto"),
    ("gemma3_text", "bfloat16", "fp8", "auto"),
    ("phi3", "float32", "int4_fast", "auto"),
    ("gpt2", "float32", "none", "auto"),
    ("gpt2", "bfloat16", "int8", "auto"),
    ("mixtral", "float32", "none", "auto"),
    ("mixtral", "bfloat16", "int8", "auto"),
    ("qwen2_moe", "bfloat16", "none", "auto"),
    ("qwen2_moe", "float32", "int4_fast", "auto"),
    ("qwen3_moe", "bfloat16", "fp8", "auto"),
    ("deepseek_v2", "float32", "none", "fp8"),
    ("deepseek_v2", "bfloat16", "int8", "int8"),
    ("deepseek_v3", "float32", "none", "auto"),
    ("deepseek_v3", "bfloat16", "int4_fast", "auto"),
]
"""Checkpoint, dtype, weight format, KV format."""

GPU_ROWS = [("llama", "bfloat16", "none"), ("llama", "float32", "int8_fast"), ("mixtral", "float32", "none")]
"""Cases with a prompt of more than 64 rows in one step: products of fewer rows have other tiles."""

GPU_LAYOUTS = [("llama", "bfloat16", "tp2"), ("mixtral", "float32", "tp2 ep")]
ISAS = ("portable", "avx2", "avx512", "avx512_bf16", "avx512_amx")
_LONG = {"num_hidden_layers": 2, "max_position_embeddings": 1024, "hidden_size": 288, "intermediate_size": 592}
LONG_SHAPES: dict[str, dict[str, Any]] = {
    "gemma2": {**_LONG, "sliding_window": 300},
    "gpt2": {"n_layer": 2, "n_positions": 1024, "n_embd": 288},
    "deepseek_v3": {**_LONG, "kv_lora_rank": 96, "moe_intermediate_size": 80},
}
"""Shapes for prompts that are longer than a split of attention (512 keys), and for layers of many tiles."""
PACKED = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
}


def make_cases() -> list[Case]:
    """All cases. Those of a group are neighbours."""
    from tests.models.checkpoints import FAMILIES

    cases = [Case("llm", "llama", {"dtype": "bfloat16", "quantization": "int8"}, "short")]
    cases.append(Case("llm", "mixtral", {"dtype": "float32", "tensor_parallel_size": 2}, "short"))
    cases += _gpu_cases()
    for index, family in enumerate((*FAMILIES, *PACKED_MODELS)):
        for dtype, weights in _FORMATS:
            for kv in _kv_formats(family):
                options = {"dtype": dtype, "quantization": weights, "kv_cache_dtype": kv}
                cases.append(Case(f"cpu/{index % 2}", family, options))
    cases += _special_cases()
    for index, family in enumerate((*FAMILIES, "llama-gptq")):
        for name, layout in LAYOUTS.items():
            if "enable_expert_parallel" in layout and not _has_experts(family):
                continue
            for dtype, weights in (
                ("float32", "none"),
                ("bfloat16", "none"),
                ("bfloat16", "int8"),
                ("float32", "int4_fast"),
            ):
                options = {**layout, "dtype": dtype, "quantization": weights, "distributed_executor_backend": "threads"}
                # The largest layouts run with one format each.
                if name not in ("tp3", "tp2 pp2", "tp2 dp2 ep") or (dtype, weights) == _FORMATS[index % 6]:
                    cases.append(Case(f"layouts/{index % 2}", family, options, "short"))
    for isa in ISAS:
        for family in FAMILIES:
            for dtype, weights in _FORMATS:
                kv = _kv_formats(family)[-1] if weights == "int8" else "auto"
                options = {"dtype": dtype, "quantization": weights, "kv_cache_dtype": kv}
                cases.append(Case(f"isa:{isa}", family, options))
    return cases


def _kv_formats(family: str) -> tuple[str, ...]:
    """The KV types that are compared."""
    return ("auto",) if family.startswith("deepseek") else ("auto", "int8")


def _has_experts(family: str) -> bool:
    return family.startswith("deepseek") or family.endswith("_moe") or family == "mixtral"


def _special_cases() -> list[Case]:
    """Variants of the families, long prompts with wide layers, dummy weights, checks for NaN."""
    from tests.models.checkpoints import FAMILIES, VARIANTS

    cases = []
    for name, variant in VARIANTS.items():
        if name in FAMILIES:
            continue
        # If the rope scaling depends on the length, keep the variant's own length.
        matters = variant.prompt_len != 40 or "dynamic" in name
        for dtype, weights in (("float32", "none"), ("bfloat16", "int8")):
            options = {"dtype": dtype, "quantization": weights, "max_model_len": variant.prompt_len if matters else 60}
            cases.append(Case("cpu/2", name, options, "short"))
    for family in ("llama", "gemma2", "mixtral", "gpt2", "deepseek_v3"):
        for dtype, weights in _FORMATS:
            for kv in _kv_formats(family):
                options = {"dtype": dtype, "quantization": weights, "kv_cache_dtype": kv}
                options["max_num_batched_tokens"] = 384
                cases.append(Case("cpu/2", f"{family}+long", options, "long"))
    for family in ("llama", "mixtral", "deepseek_v3"):
        for extra in ({"load_format": "dummy"}, {"check_finite": True}, {"enable_prefix_caching": False}):
            cases.append(Case("cpu/2", family, {"dtype": "bfloat16", "quantization": "int8", **extra}))
    return cases


def _gpu_cases() -> list[Case]:
    cases: list[Case] = []
    for checkpoint, dtype, weights, kv in GPU_CASES:
        options: dict[str, Any] = {"dtype": dtype, "quantization": weights, "kv_cache_dtype": kv}
        cases.append(Case(f"triton/{len(cases) % 2}", f"{checkpoint}+2-layers", options, "few"))
    for checkpoint, dtype, weights in GPU_ROWS:
        options = {"dtype": dtype, "quantization": weights, "max_num_batched_tokens": 256}
        cases.append(Case(f"triton/{len(cases) % 2}", f"{checkpoint}+2-layers", options, "rows"))
    for checkpoint, dtype, layout in GPU_LAYOUTS:
        options = {"dtype": dtype, "distributed_executor_backend": "threads", **LAYOUTS[layout]}
        cases.append(Case(f"triton/{len(cases) % 2}", f"{checkpoint}+2-layers", options, "few"))
    return sorted(cases, key=lambda case: case.group)


def make_checkpoint_of(name: str, folder: Path) -> None:
    """Save the checkpoint that a case names: a variant of tests/models/checkpoints.py, perhaps longer or packed."""
    from tests.models.checkpoints import make_variant
    from tests.runtime.loader.packer import pack_checkpoint
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    overrides: dict[str, Any] = {}
    if name.endswith("+2-layers"):
        overrides["num_hidden_layers"] = 2
        name = name.removesuffix("+2-layers")
    if name.endswith("+long"):
        name = name.removesuffix("+long")
        overrides = LONG_SHAPES.get(name, _LONG)
    family, _, method = name.rpartition("-")
    if method not in PACKED:
        make_variant(name, folder, **overrides)
        return
    with tempfile.TemporaryDirectory() as scratch:
        # The intermediate size has whole groups. There are few layers, since the packer is slow.
        shape = {"num_hidden_layers": 2, **overrides, "intermediate_size": 128}
        plain = make_variant(family, Path(scratch) / "whole", **shape)
        pack_checkpoint(plain, folder, Path(scratch) / "plain", PACKED[method])
