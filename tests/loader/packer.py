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


def quantize(weight: Array, group_size: int, symmetric: bool, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """[out, in] -> q [out, in], scales fp16 [out, groups] and zero points [out, groups], 1 to 15."""
    out_features, in_features = weight.shape
    size = in_features if group_size == -1 else group_size
    num_groups = -(-in_features // size)
    q = np.zeros((out_features, in_features), dtype=np.int64)
    scales = np.zeros((out_features, num_groups), dtype=np.float16)
    zeros = np.full((out_features, num_groups), 8)
    if not symmetric:
        zeros = rng.integers(1, 16, size=zeros.shape)
    for group in range(num_groups):
        columns = slice(group * size, min((group + 1) * size, in_features))
        part, zero = weight[:, columns], zeros[:, group, None]
        scales[:, group] = np.abs(part).max(1) / 7
        q[:, columns] = np.clip(np.rint(part / scales[:, group, None].astype(np.float64)) + zero, 0, 15)
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


def words_of(numbers: Array, places: dict[int, int] | None = None) -> torch.Tensor:
    """[rows, 8 W] numbers below 16 -> [rows, W] int32; the n-th of eight goes to bits 4 * places[n]."""
    rows, count = numbers.shape
    words = np.zeros((rows, count // 8), dtype=np.uint32)
    for row, values in enumerate(numbers.tolist()):
        packed = [0] * (count // 8)
        for column, value in enumerate(values):
            place = column % 8 if places is None else places[column % 8]
            packed[column // 8] |= value << (4 * place)
        words[row] = packed
    return torch.from_numpy(words.view(np.int32))


def packed_tensors(method: str, q: Array, scales: Array, zeros: Array, zero_offset: int) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint has in the place of a weight, by the last part of their names."""
    parts = {"scales": torch.from_numpy(scales.T.copy())}
    if method == "gptq":
        parts["qweight"] = words_of(q).T.contiguous()
        parts["qzeros"] = words_of(zeros.T - zero_offset)
    else:
        parts["qweight"] = words_of(q.T, _AWQ_PLACES)
        parts["qzeros"] = words_of(zeros.T, _AWQ_PLACES)
    return parts


def pack_checkpoint(folder: Path, packed: Path, plain: Path, config: dict[str, Any]) -> None:
    """Two checkpoints of one in `folder`: its layers' linear weights packed as `config` says, and dequantized."""
    rng = np.random.default_rng(5)
    method, group_size = config["quant_method"], config["group_size"]
    tensors = load_file(folder / "model.safetensors")
    ours: dict[str, torch.Tensor] = {}
    theirs: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        is_linear = ".layers." in key and key.endswith(_LINEARS)
        if not is_linear:
            ours[key] = theirs[key] = tensor
            continue
        q, scales, zeros = quantize(tensor.double().numpy(), group_size, config.get("sym", False), rng)
        theirs[key] = torch.from_numpy(dense(q, scales, zeros, group_size)).float()
        offset = 1 if config.get("checkpoint_format", "gptq") == "gptq" else 0
        for part, value in packed_tensors(method, q, scales, zeros, offset).items():
            ours[f"{key.removesuffix('weight')}{part}"] = value
        if method == "gptq":
            size = tensor.shape[1] if group_size == -1 else group_size
            ours[f"{key.removesuffix('weight')}g_idx"] = (torch.arange(tensor.shape[1]) // size).int()
    for target, made, extra in ((packed, ours, {"quantization_config": config}), (plain, theirs, {})):
        target.mkdir()
        values = json.loads((folder / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**values, **extra}))
        save_file(made, target / "model.safetensors", {"format": "pt"})
