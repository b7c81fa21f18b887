"""Writes GGUF files as llama.cpp's converter does, with the names and quantizers of the `gguf` package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from .gguf_metadata import add_config, add_value

Array = npt.NDArray[Any]
ChooseType = Callable[[str, Array], Type]

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt_oss": "gpt-oss",
    "gpt2": "gpt2",
    "granite": "granite",
    "mistral": "mistral3",
    "ministral3": "mistral3",
    "smollm3": "smollm3",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
    "llama4_text": "llama4",
    "minimax_m2": "minimax-m2",
    "gemma4_text": "gemma4",
    "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "seed_oss": "seed_oss",
    "glm4": "glm4",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "exaone4": "exaone4",
    "cohere2": "cohere2",
}
_PERMUTED = ("llama", "granite", "mistral3", "smollm3")
"""Architectures of which the converter reorders the rows of q and k."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_SPLIT_KV = re.compile(r"model\.layers\.(\d+)\.self_attn\.kv_b_proj\.weight")

_SPREADS = {Type.Q4_K: 3e-4, Type.Q5_K: 2e-4, Type.Q6_K: 1e-4}
"""Of random scales d, so that weights are about as large as a model's."""


def plain(name: str, values: Array) -> Type:
    """F32 for everything."""
    return Type.F32


def mixed(*types: Type) -> ChooseType:
    """The types in turn for matrices whose rows fill blocks; Q8_0 where they fill only its blocks."""
    count = 0

    def choose(name: str, values: Array) -> Type:
        nonlocal count
        if values.ndim < 2 or "ffn_gate_inp" in name or name.endswith(".bias"):
            return Type.F32
        count += 1
        kind = types[count % len(types)]
        for fitting in (kind, Type.Q8_0):
            if values.shape[-1] % gguf.GGML_QUANT_SIZES[fitting][0] == 0:
                return fitting
        return Type.F32

    return choose


def random_blocks(kind: Type, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Random bytes of a type, with small scales: [..., bytes] uint8."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, num_bytes), dtype=np.uint8)
    # Where a block has its float16 scales.
    offsets = {Type.Q6_K: [208], Type.MXFP4: []}.get(kind, [0])
    offsets = [0, 2] if kind in (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K) else offsets
    for offset in offsets:
        scales = rng.normal(0, _SPREADS.get(kind, 0.05), blocks.shape[:-1])
        blocks[..., offset : offset + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    if kind == Type.MXFP4:
        blocks[..., 0] = rng.integers(0, 8, blocks.shape[:-1]) + 116
    return blocks.reshape(*shape[:-1], -1)


def quantize(kind: Type, values: Array, rng: np.random.Generator) -> Array:
    """`values` in a type; K-blocks, which the package cannot make, are random."""
    if kind in (Type.Q4_K, Type.Q5_K, Type.Q6_K):
        return random_blocks(kind, values.shape, rng)
    return gguf.quantize(values, kind)


def write_gguf(
    folder: Path,
    file: Path,
    choose: ChooseType = plain,
    *,
    metadata: dict[str, Any] | None = None,
    split_latents: bool = False,
    split_max_tensors: int = 0,
) -> dict[str, torch.Tensor]:
    """Convert the checkpoint in `folder`. Returns the tensors that the file stands for, with their old keys.

    `split_latents`: kv_b_proj becomes two tensors. `split_max_tensors`: of a part; 0: one file.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = {k: v.numpy() for part in folder.glob("*.safetensors") for k, v in load_file(part).items()}
    arch = ARCHITECTURES[config["model_type"]]
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=split_max_tensors)
    add_config(writer, config, split_latents)
    for key, value in (metadata or {}).items():
        add_value(writer, key, value)
    (number,) = (n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, 9)
    result: dict[str, torch.Tensor] = {}

    def add(name: str, values: Array) -> Array:
        kind = choose(name, values)
        stored = quantize(kind, values, rng)
        writer.add_tensor(name, stored, raw_dtype=kind)
        return gguf.dequantize(stored, kind)

    groups: dict[str, dict[int, str]] = {}
    for key in tensors:
        found = _EXPERT.fullmatch(key)
        groups.setdefault(f"{found[1]}.{found[3]}" if found else key, {})[int(found[2]) if found else -1] = key
    for group, keys in groups.items():
        values = np.stack([tensors[keys[i]] for i in sorted(keys)]) if -1 not in keys else tensors[keys[-1]]
        values = values.astype(np.float32)
        if group == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if split_latents and (found := _SPLIT_KV.fullmatch(group)):
            result[group] = torch.from_numpy(_add_latents(add, f"blk.{found[1]}", values, config))
            continue
        if arch in ("gpt-oss", "llama4", "qwen3vlmoe") and ".experts." in group:
            result[group] = torch.from_numpy(_add_stacked_experts(add, group, values, alternate=arch == "gpt-oss"))
            continue
        name = _name(names, group)
        name = f"{name}.weight" if name.endswith("attn_sinks") else name
        forward, backward = _transform(group, config, arch)
        restored = backward(add(name, forward(values)))
        for index, key in keys.items():
            result[key] = torch.from_numpy(np.ascontiguousarray(restored if index < 0 else restored[index]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return result


def save_plain(folder: Path, source: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint in Hugging Face format of these tensors, with the configuration in `source`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _name(names: gguf.TensorNameMap, key: str) -> str:
    """The converter's name of a tensor."""
    if key.endswith((".router.scale", ".router.per_expert_scale")):
        layer, part = key.split(".")[2], "ffn_gate_inp" if key.endswith("router.scale") else "ffn_down_exps"
        return f"blk.{layer}.{part}.scale"
    if key.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
        key = f"{key}.weight"
    # The converter names the biases of experts like this.
    name = names.get_name(key.replace("e_score_correction_bias", "e_score_correction.bias"), (".weight", ".bias"))
    assert name is not None, key
    return name


def _transform(
    key: str, config: dict[str, Any], arch: str
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """What the converter does to a tensor, and its inverse."""
    if arch in _PERMUTED and (found := re.search(r"\.([qk])_proj\.", key)):
        heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
        return (
            lambda w: w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape),
            lambda w: w.reshape(heads, -1, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape),
        )
    if arch in ("gemma", "gemma2", "gemma3") and "norm" in key:
        return lambda w: w + np.float32(1), lambda w: w
    if arch == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return lambda w: w.T.copy(), lambda w: w.T
    return lambda w: w, lambda w: w


def _add_stacked_experts(add: Callable[[str, Array], Array], key: str, values: Array, *, alternate: bool) -> Array:
    """The model has [experts, in, out], with outputs of gate and up in turn (`alternate`) or one after the other; files
    have [experts, out, in] of each."""
    is_bias, prefix = key.endswith("_bias"), f"blk.{key.split('.')[2]}.ffn"
    kind = "bias" if is_bias else "weight"
    rows = values if is_bias else values.swapaxes(1, 2)
    if "gate_up" in key:
        half = rows.shape[1] // 2
        parts = (rows[:, ::2], rows[:, 1::2]) if alternate else (rows[:, :half], rows[:, half:])
        halves = [
            add(f"{prefix}_{name}_exps.{kind}", np.ascontiguousarray(part))
            for name, part in zip(("gate", "up"), parts, strict=True)
        ]
        rows = np.stack(halves, 2 if alternate else 1).reshape(rows.shape)
    else:
        rows = add(f"{prefix}_down_exps.{kind}", np.ascontiguousarray(rows))
    return np.ascontiguousarray(rows if is_bias else rows.swapaxes(1, 2))


def _add_latents(add: Callable[[str, Array], Array], prefix: str, values: Array, config: dict[str, Any]) -> Array:
    heads, nope, size = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
    both = values.reshape(heads, nope + size, -1)
    keys = add(f"{prefix}.attn_k_b.weight", both[:, :nope].swapaxes(1, 2).copy())
    latent = add(f"{prefix}.attn_v_b.weight", both[:, nope:].copy())
    return np.concatenate((keys.swapaxes(1, 2), latent), axis=1).reshape(values.shape)
