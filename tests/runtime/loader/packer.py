"""Packs weights as AutoGPTQ and AutoAWQ do, number by number: written for these tests, from the layouts alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Array = npt.NDArray[Any]
_AWQ_PLACES = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}
"""In which four bits of a word AutoAWQ keeps the n-th of eight neighbours."""

_LINEARS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")


def quantize(
    weight: Array, group_size: int, symmetric: bool, rng: np.random.Generator, bits: int = 4
) -> tuple[Array, Array, Array]:
    """[out, in] -> q [out, in], scales fp16 [out, groups] and zero points [out, groups], 1 to 2^bits - 1."""
    half = 1 << (bits - 1)
    out_features, in_features = weight.shape
    size = in_features if group_size == -1 else group_size
    num_groups = -(-in_features // size)
    q = np.zeros((out_features, in_features), dtype=np.int64)
    scales = np.zeros((out_features, num_groups), dtype=np.float16)
    zeros: Array = np.full((out_features, num_groups), half)
    if not symmetric:
        zeros = rng.integers(1, 2 * half, size=zeros.shape)
    for group in range(num_groups):
        columns = slice(group * size, min((group + 1) * size, in_features))
        part, zero = weight[:, columns], zeros[:, group, None]
        scales[:, group] = np.abs(part).max(1) / (half - 1)
        q[:, columns] = np.clip(np.rint(part / scales[:, group, None].astype(np.float64)) + zero, 0, 2 * half - 1)
    return q, scales, zeros


def dense(q: Array, scales: Array, zeros: Array, group_size: int) -> Array:
    """The weight that these numbers stand for, in fp64."""
    size = q.shape[1] if group_size == -1 else group_size
    steps, offsets = scales.astype(np.float64).tolist(), zeros.tolist()
    weight = np.zeros(q.shape)
    for row, numbers in enumerate(q.tolist()):
        values = []
        for column, number in enumerate(numbers):
            group = column // size
            values.append((number - offsets[row][group]) * steps[row][group])
        weight[row] = values
    return weight


def words_of(numbers: Array, places: dict[int, int] | None = None, bits: int = 4) -> torch.Tensor:
    """[rows, W words] numbers of `bits` -> [rows, W] int32; the n-th of a word goes to bits `bits` * places[n]."""
    rows, count = numbers.shape
    per_word = 32 // bits
    words = np.zeros((rows, count // per_word), dtype=np.uint32)
    for row, values in enumerate(numbers.tolist()):
        packed = [0] * (count // per_word)
        for column, value in enumerate(values):
            place = column % per_word if places is None else places[column % per_word]
            packed[column // per_word] |= value << (bits * place)
        words[row] = packed
    return torch.from_numpy(words.view(np.int32))


def packed_tensors(
    method: str, q: Array, scales: Array, zeros: Array, zero_offset: int, bits: int = 4
) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint has in the place of a weight, by the last part of their names."""
    parts = {"scales": torch.from_numpy(scales.T.copy())}
    if method == "gptq":
        parts["qweight"] = words_of(q, bits=bits).T.contiguous()
        parts["qzeros"] = words_of(zeros.T - zero_offset, bits=bits)
    else:
        parts["qweight"] = words_of(q.T, _AWQ_PLACES)
        parts["qzeros"] = words_of(zeros.T, _AWQ_PLACES)
    return parts


def pack_checkpoint(folder: Path, packed: Path, plain: Path, config: dict[str, Any]) -> None:
    """Two checkpoints of one in `folder`: its layers' linear weights packed as `config` says, and dequantized."""
    rng = np.random.default_rng(5)
    method, group_size, bits = config["quant_method"], config["group_size"], config["bits"]
    tensors = load_file(folder / "model.safetensors")
    ours: dict[str, torch.Tensor] = {}
    theirs: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        is_linear = ".layers." in key and key.endswith(_LINEARS)
        if not is_linear:
            ours[key] = theirs[key] = tensor
            continue
        # With desc_act, columns are quantized in another order, and each keeps the group that it had there.
        order = rng.permutation(tensor.shape[1]) if config.get("desc_act") else np.arange(tensor.shape[1])
        places = np.argsort(order)
        sorted_weight = tensor.double().numpy()[:, order]
        q, scales, zeros = quantize(sorted_weight, group_size, config.get("sym", False), rng, bits)
        theirs[key] = torch.from_numpy(dense(q, scales, zeros, group_size)[:, places].copy("C")).float()
        q = q[:, places]
        offset = 1 if config.get("checkpoint_format", "gptq") == "gptq" else 0
        for part, value in packed_tensors(method, q, scales, zeros, offset, bits).items():
            ours[f"{key.removesuffix('weight')}{part}"] = value
        if method == "gptq":
            size = tensor.shape[1] if group_size == -1 else group_size
            ours[f"{key.removesuffix('weight')}g_idx"] = torch.from_numpy(places // size).int()
    for target, made, extra in ((packed, ours, {"quantization_config": config}), (plain, theirs, {})):
        target.mkdir()
        values = json.loads((folder / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**values, **extra}))
        save_file(made, target / "model.safetensors", {"format": "pt"})
