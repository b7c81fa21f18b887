"""Writes tiny checkpoints in every format, and the same weights dense, decoded by the format's own library."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors of a module by the last part of their names, and its weight in float32."""
Store = Callable[[Tensor, torch.Generator], Stored]

_LINEARS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
_E4M3_MAX = 448.0


class Format(NamedTuple):
    """A way of storing weights."""

    section: dict[str, Any]
    """The quantization_config."""
    store: Store
    also: Mapping[str, Store] = MappingProxyType({})
    """Other ways, for modules whose names contain the key."""
    skipped: tuple[str, ...] = ()
    """Parts of the names of modules that stay dense."""


def write_checkpoint(folder: Path, packed: Path, plain: Path, form: Format) -> None:
    """Two checkpoints of the one in `folder`: its layers' linear weights stored as `form` says, and decoded."""
    generator = torch.Generator().manual_seed(5)
    ours: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        if not (".layers." in key and key.endswith(_LINEARS)) or any(part in key for part in form.skipped):
            ours[key] = theirs[key] = tensor
            continue
        store = next((store for part, store in form.also.items() if part in key), form.store)
        parts, theirs[key] = store(tensor.float(), generator)
        ours.update({f"{key.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()})
    config = json.loads((folder / "config.json").read_text())
    _save(packed, {**config, "quantization_config": form.section}, ours)
    _save(plain, config, theirs)


def _save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_mxfp4_experts(family: str, folder: Path, packed: Path, plain: Path) -> None:
    """Two checkpoints of a `family` with stacked experts: random MXFP4 in their place, and decoded by transformers.
    The one in `folder` may have experts of their own; they are stacked first."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = {**json.loads((folder / "config.json").read_text()), "model_type": family}
    generator = torch.Generator().manual_seed(3)
    ours: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    for key, tensor in _stack_experts(load_file(folder / "model.safetensors")).items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            ours[key] = theirs[key] = tensor
            continue
        experts, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 123, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        ours |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        theirs[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    _save(packed, {**config, "quantization_config": section}, ours)
    _save(plain, config, theirs)


def as_language_model_of_qwen3_vl(folder: Path, target: Path) -> Path:
    """The checkpoint of Qwen3 or, with one layer, Qwen3-MoE in `folder` as one of the language model of Qwen3-VL."""
    config = json.loads((folder / "config.json").read_text())
    names = {"qwen3": "qwen3_vl_text", "qwen3_moe": "qwen3_vl_moe_text"}
    tensors = {
        key: tensor.contiguous() for key, tensor in _stack_experts(load_file(folder / "model.safetensors")).items()
    }
    _save(target, {**config, "model_type": names[config["model_type"]]}, tensors)
    return target


def _stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts stored one by one become [experts, in, out]; there is one layer then."""
    experts: dict[str, list[Tensor]] = {}
    for key in [key for key in tensors if key.endswith("_proj.weight") and ".experts." in key]:
        experts.setdefault(key.split(".")[-2], []).append(tensors.pop(key).T)
    if experts:
        gate, up = torch.stack(experts["gate_proj"]), torch.stack(experts["up_proj"])
        tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.cat([gate, up], 2)
        tensors["model.layers.0.mlp.experts.down_proj"] = torch.stack(experts["down_proj"])
    return tensors


def to_e4m3(weight: Tensor, scale: Tensor) -> Tensor:
    """The nearest e4m3 codes of weight / scale."""
    return (weight / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def by_blocks(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude of each block; blocks at the ends may be smaller."""
    rows, columns = (-(-size // length) for size, length in zip(weight.shape, block, strict=True))
    found = torch.zeros(rows, columns)
    for i in range(rows):
        for j in range(columns):
            part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            found[i, j] = part.abs().max()
    return found


def fp8_blocks(block: tuple[int, int], part: str = "weight_scale_inv", dtype: torch.dtype = torch.float32) -> Store:
    """DeepSeek's fp8. transformers decodes it."""

    def store(weight: Tensor, generator: torch.Generator) -> Stored:
        from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

        scale = (by_blocks(weight, block) / _E4M3_MAX).to(dtype)
        spread = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        codes = to_e4m3(weight, spread[: weight.shape[0], : weight.shape[1]])
        dense = _dequantize_fp8_weight(codes, scale.float(), list(block), torch.float32)
        return {"weight": codes, part: scale}, dense

    return store


def fp8_tensor(part: str = "weight_scale", shape: tuple[int, ...] = (), input_part: str = "input_scale") -> Store:
    """fp8 with one scale for the tensor."""

    def store(weight: Tensor, generator: torch.Generator) -> Stored:
        scale = weight.abs().max() / _E4M3_MAX
        codes = to_e4m3(weight, scale)
        return {"weight": codes, part: scale.reshape(shape), input_part: torch.ones(())}, codes.float() * scale

    return store


def fp8_rows(flat: bool = False, dtype: torch.dtype = torch.float32) -> Store:
    """fp8 with one scale for each output."""

    def store(weight: Tensor, generator: torch.Generator) -> Stored:
        scale = (weight.abs().amax(1, keepdim=True) / _E4M3_MAX).to(dtype)
        codes = to_e4m3(weight, scale.float())
        return {"weight": codes, "weight_scale": scale[:, 0] if flat else scale}, codes.float() * scale.float()

    return store


def compressed(form: str, dtype: torch.dtype = torch.float32, g_idx: bool = False, **weights: Any) -> Store:
    """compressed-tensors; the library packs the weight and decodes it."""

    def store(weight: Tensor, generator: torch.Generator) -> Stored:
        from compressed_tensors.compressors.base import BaseCompressor
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        # The library reads such files, but it no longer makes their configuration.
        args = QuantizationArgs(**{key: value for key, value in weights.items() if key != "actorder"})
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        order = torch.randperm(weight.shape[1], generator=generator) if g_idx else torch.arange(weight.shape[1])
        state = {"weight": weight[:, order], **_scales_of(weight[:, order], args, dtype, generator)}
        library = BaseCompressor.get_value_from_registry(form)
        parts = library.compress(state, scheme)
        dense = library.decompress(parts, scheme)["weight"]
        if parts["weight_scale"].dtype == torch.uint8:
            dense = dense.float()  # scales are powers of two, so 16 bits hold every product
        if dense.dtype != torch.float32:
            in_float32 = {**parts, "weight_scale": parts["weight_scale"].float()}
            exact = library.decompress(in_float32, scheme)["weight"]
            exact = exact if exact.dtype == torch.float32 else _decoded_nvfp4(parts)
            assert torch.equal(exact.to(dense.dtype), dense)
            dense = exact
        if g_idx:
            # Older files have the columns in the model's order, and say which group each belongs to.
            assert args.group_size is not None
            places = order.argsort()
            codes = unpack_from_int32(parts["weight_packed"], args.num_bits, weight.shape)
            parts["weight_packed"] = pack_to_int32(codes[:, places], args.num_bits)
            parts["weight_g_idx"] = (places // args.group_size).int()
            dense = dense[:, places]
        return parts, dense.contiguous()

    return store


def _decoded_nvfp4(parts: dict[str, Tensor]) -> Tensor:
    """The weight before the library rounds it to 16 bits, which it always does with this format."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    rows, columns = parts["weight_packed"].shape
    values = unpack_fp4_from_uint8(parts["weight_packed"], rows, 2 * columns, dtype=torch.float32)
    scales = parts["weight_scale"].float() / parts["weight_global_scale"]
    return values * scales.repeat_interleave(16, 1)


def _scales_of(weight: Tensor, args: Any, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """The scales, and zero points if they are asked for, as llm-compressor has them before it packs."""
    rows, columns = weight.shape
    block = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "block": tuple(args.block_structure or ()),
        "group": (1, args.group_size),
        "tensor_group": (1, args.group_size),
    }[args.strategy]
    largest = {"int": float(1 << (args.num_bits - 1)) - 1, "float": _E4M3_MAX if args.num_bits == 8 else 6.0}
    scale = by_blocks(weight, block) / largest[args.type]
    if args.strategy == "tensor":
        scale = scale.reshape(1)
    found = {"weight_scale": scale.to(dtype)}
    if args.strategy == "tensor_group":
        divisor = _E4M3_MAX / scale.max()
        found = {
            "weight_scale": (scale * divisor).to(torch.float8_e4m3fn).float(),
            "weight_global_scale": divisor.reshape(1),
        }
    if args.num_bits == 4 and args.type == "float" and args.group_size == 32:
        found["weight_scale"] = 2.0 ** scale.log2().ceil()
    if not args.symmetric:
        low = -(1 << (args.num_bits - 1))
        found["weight_zero_point"] = torch.randint(low, -low, scale.shape, generator=generator).to(torch.int8)
    return found


def modelopt_nvfp4(weight: Tensor, generator: torch.Generator) -> Stored:
    """ModelOpt's NVFP4: scales of 16 neighbours are multiplied by one number for the tensor."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    factor = weight.abs().max() / (6 * _E4M3_MAX)
    groups = weight.view(weight.shape[0], -1, 16)
    scales = (groups.abs().amax(2) / 6 / factor).to(torch.float8_e4m3fn)
    steps = (scales.float() * factor)[..., None]
    codes = ((groups / steps).abs()[..., None] - values).abs().argmin(-1)
    dense = (values[codes] * groups.sign() * steps).view(weight.shape)
    numbers = (codes + 8 * (groups < 0)).view(weight.shape).to(torch.uint8)
    packed = numbers[:, 1::2] << 4 | numbers[:, ::2]
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": factor, "input_scale": torch.ones(())}, dense


def bitsandbytes_4bit(kind: str, nested: bool, block: int = 64) -> Store:
    """bitsandbytes in 4 bits: the library quantizes, and decodes."""

    def store(weight: Tensor, generator: torch.Generator) -> Stored:
        with patch.object(torch, "compile", lambda function, **_: function):  # its compiler takes seconds to import
            functional = pytest.importorskip("bitsandbytes.functional")
        codes, state = functional.quantize_4bit(weight, blocksize=block, compress_statistics=nested, quant_type=kind)
        parts = {f"weight.{part}": value for part, value in state.as_dict(packed=True).items()}
        # The library's kernel for the CPU is wrong for blocks that cross rows, so it decodes one long row.
        state.shape = torch.Size([1, weight.numel()])
        return {"weight": codes, **parts}, functional.dequantize_4bit(codes, state).view(weight.shape)

    return store


def bitsandbytes_int8(weight: Tensor, generator: torch.Generator) -> Stored:
    """bitsandbytes in 8 bits. Its own product of scales and codes is rounded in another order."""
    scale = weight.abs().amax(1)
    codes = (weight / scale[:, None] * 127).round().to(torch.int8)
    return {"weight": codes, "SCB": scale}, codes.float() * (scale * (1 / 127))[:, None]
