"""The ways of storing weights that the tests cover, besides GGUF, GPTQ and AWQ."""

from __future__ import annotations

from typing import Any

import torch

from .stored_checkpoints import (
    Format,
    Store,
    bitsandbytes_4bit,
    bitsandbytes_int8,
    compressed,
    fp8_blocks,
    fp8_rows,
    fp8_tensor,
    modelopt_nvfp4,
)


def _fp8(**section: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **section}


def _group(form: str, targets: list[str], **weights: Any) -> dict[str, Any]:
    return {"format": form, "targets": targets, "weights": weights, "input_activations": None}


def _compressed(form: str, dtype: torch.dtype = torch.float32, g_idx: bool = False, **weights: Any) -> Format:
    section = {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": _group(form, ["Linear"], **weights)},
    }
    return Format(section, compressed(form, dtype, g_idx, **weights))


_INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}
_E4M3: dict[str, Any] = {"num_bits": 8, "type": "float"}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]}


def _with_int8_inputs() -> Format:
    form = _compressed("int-quantized", num_bits=8, type="int", strategy="channel")
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    form.section["config_groups"]["group_0"]["input_activations"] = inputs
    return form


def _several_groups() -> Format:
    """Attention in 8 bits, the other modules in 4, and one layer not at all."""
    attention: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
    section = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": ["lm_head", "re:.*layers\\.1\\.mlp.*"],
        "config_groups": {
            "group_0": _group("pack-quantized", ["Linear"], **_INT4),
            "group_1": _group("int-quantized", ["re:.*self_attn\\.[qkvo]_proj"], **attention),
        },
    }
    also: dict[str, Store] = {"self_attn": compressed("int-quantized", **attention)}
    return Format(section, compressed("pack-quantized", torch.bfloat16, **_INT4), also, skipped=("layers.1.mlp",))


FORMATS = {
    "fp8 blocks": Format(_fp8(weight_block_size=[24, 40]), fp8_blocks((24, 40))),
    "fp8 blocks, exponents": Format(
        _fp8(weight_block_size=[128, 128], scale_fmt="ue8m0", modules_to_not_convert=["model.layers.1.mlp"]),
        fp8_blocks((128, 128), dtype=torch.float8_e8m0fnu),
        skipped=("layers.1.mlp",),
    ),
    "fp8 a tensor": Format(_fp8(activation_scheme="static"), fp8_tensor()),
    "fp8 a tensor, inverse": Format(_fp8(), fp8_tensor("weight_scale_inv", (1,), "activation_scale")),
    "fp8 an output": Format(_fp8(), fp8_rows(flat=True)),
    "fbgemm": Format({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_rows()),
    "float a tensor": _compressed("float-quantized", **_E4M3, strategy="tensor"),
    "float an output": _compressed("float-quantized", torch.bfloat16, **_E4M3, strategy="channel"),
    "float blocks": _compressed("float-quantized", **_E4M3, strategy="block", block_structure=[16, 24]),
    "naive": _compressed("naive-quantized", **_E4M3, strategy="channel"),
    "int8": _compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "int8 with int8 inputs": _with_int8_inputs(),
    "int4": _compressed("pack-quantized", **_INT4),
    "int4 with zero points": _compressed("pack-quantized", **_INT4, symmetric=False),
    "int4 sorted": _compressed("pack-quantized", g_idx=True, actorder="group", **_INT4),
    "int8 packed": _compressed("pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
    "several groups": _several_groups(),
    "nvfp4": _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    "mxfp4": _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    "nf4": Format({**_BNB, "bnb_4bit_quant_type": "nf4"}, bitsandbytes_4bit("nf4", nested=False)),
    "nf4 nested": Format(
        {**_BNB, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, bitsandbytes_4bit("nf4", nested=True)
    ),
    "fp4": Format({**_BNB, "bnb_4bit_quant_type": "fp4"}, bitsandbytes_4bit("fp4", nested=True)),
    "modelopt nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["*.layers.1.self_attn*"]},
        modelopt_nvfp4,
        skipped=("layers.1.self_attn",),
    ),
    "modelopt fp8": Format({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": None}, fp8_tensor()),
    "bitsandbytes int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes_int8),
}
