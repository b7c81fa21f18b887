"""Random checkpoints of one shape in several formats, so that engines can be compared on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from tests.runtime.loader.gguf_writer import random_blocks
from torch import Tensor

VOCAB_SIZE = 128256
_GROUP = 128
"""Columns that share a scale in AWQ."""


@dataclass(frozen=True)
class Shape:
    """A Llama with a tied embedding."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def matrices(self) -> Iterator[tuple[str, str, tuple[int, int]]]:
        """Names in Hugging Face format and in GGUF, and [outputs, inputs], of the weights in layers."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for i in range(self.layers):
            for name, short, shape in (
                ("self_attn.q_proj", "attn_q", (q, self.hidden)),
                ("self_attn.k_proj", "attn_k", (kv, self.hidden)),
                ("self_attn.v_proj", "attn_v", (kv, self.hidden)),
                ("self_attn.o_proj", "attn_output", (self.hidden, q)),
                ("mlp.gate_proj", "ffn_gate", (self.intermediate, self.hidden)),
                ("mlp.up_proj", "ffn_up", (self.intermediate, self.hidden)),
                ("mlp.down_proj", "ffn_down", (self.hidden, self.intermediate)),
            ):
                yield f"model.layers.{i}.{name}", f"blk.{i}.{short}", shape

    def norms(self) -> Iterator[tuple[str, str]]:
        """Names of the vectors of size `hidden`."""
        for i in range(self.layers):
            yield f"model.layers.{i}.input_layernorm", f"blk.{i}.attn_norm"
            yield f"model.layers.{i}.post_attention_layernorm", f"blk.{i}.ffn_norm"
        yield "model.norm", "output_norm"

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        }


SHAPES = {
    "llama1b": Shape(2048, 8192, 16, 32, 8, 64),
    "llama3b": Shape(3072, 8192, 28, 24, 8, 128),
}
"""Llama-3.2's shapes."""

Store = Callable[[str, tuple[int, int]], dict[str, Tensor]]
"""From a module's name and shape to its tensors."""


def _dense(name: str, shape: tuple[int, int]) -> dict[str, Tensor]:
    return {f"{name}.weight": (torch.randn(shape) * 0.02).bfloat16()}


def _fp8(name: str, shape: tuple[int, int]) -> dict[str, Tensor]:
    codes = (torch.randn(shape) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.weight_scale": torch.full((shape[0], 1), 2e-4)}


def _awq(name: str, shape: tuple[int, int]) -> dict[str, Tensor]:
    rows, columns = shape
    return {
        f"{name}.qweight": torch.randint(-(2**31), 2**31 - 1, (columns, rows // 8), dtype=torch.int32),
        f"{name}.qzeros": torch.randint(-(2**31), 2**31 - 1, (columns // _GROUP, rows // 8), dtype=torch.int32),
        f"{name}.scales": torch.full((columns // _GROUP, rows), 3e-3, dtype=torch.float16),
    }


_FP8_SECTION = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": None,
        }
    },
}
_AWQ_SECTION = {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "version": "gemm", "zero_point": True}
_SAFETENSORS: dict[str, tuple[Store, dict[str, Any]]] = {
    "bf16": (_dense, {}),
    "fp8": (_fp8, {"quantization_config": _FP8_SECTION}),
    "awq": (_awq, {"quantization_config": _AWQ_SECTION}),
}
FORMATS = (*_SAFETENSORS, "q4_0", "q4_k_m")


def checkpoint(folder: Path, shape: str, form: str) -> Path:
    """The checkpoint of this shape and format, written at the first call: a folder, or a GGUF file."""
    if form in _SAFETENSORS:
        target = folder / f"{shape}-{form}"
        if not (target / "config.json").exists():
            _write_safetensors(target, SHAPES[shape], form)
        return target
    file = folder / f"{shape}-{form}.gguf"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        _write_gguf(unfinished, SHAPES[shape], form)
        unfinished.rename(file)
    return file


def _write_safetensors(target: Path, shape: Shape, form: str) -> None:
    """One file a layer, and one for the rest, so that little is in memory at a time."""
    target.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    store, section = _SAFETENSORS[form]
    files: dict[str, list[tuple[str, tuple[int, int]]]] = {"model-rest.safetensors": []}
    for name, _, size in shape.matrices():
        files.setdefault(f"model-{name.split('.')[2]}.safetensors", []).append((name, size))
    index: dict[str, str] = {}
    for file, modules in files.items():
        tensors = {key: tensor for name, size in modules for key, tensor in store(name, size).items()}
        if not modules:
            tensors = _dense("model.embed_tokens", (VOCAB_SIZE, shape.hidden))
            tensors |= {f"{name}.weight": torch.ones(shape.hidden, dtype=torch.bfloat16) for name, _ in shape.norms()}
        save_file(tensors, target / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (target / "config.json").write_text(json.dumps({**shape.config(), **section}))


def _write_gguf(file: Path, shape: Shape, form: str) -> None:
    """The types that llama.cpp's own quantizer chooses for a model with a tied embedding."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0 if form == "q4_0" else gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_tokenizer_model("no_vocab")
    for _, name in shape.norms():
        writer.add_tensor(f"{name}.weight", np.ones(shape.hidden, np.float32))
    matrices = [(name, size) for _, name, size in shape.matrices()]
    for name, size in [("token_embd", (VOCAB_SIZE, shape.hidden)), *matrices]:
        kind = _gguf_type(name, shape.layers, form)
        writer.add_tensor(f"{name}.weight", _small_blocks(kind, size, rng), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_type(name: str, num_layers: int, form: str) -> Type:
    if name == "token_embd":
        return Type.Q6_K
    if form == "q4_0":
        return Type.Q4_0
    layer, first = int(name.split(".")[1]), num_layers // 8
    needs_more = layer < first or layer >= 7 * num_layers // 8 or (layer - first) % 3 == 2
    return Type.Q6_K if needs_more and name.endswith(("attn_v", "ffn_down")) else Type.Q4_K


def _small_blocks(kind: Type, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random bytes. A few rows are repeated: their values do not matter for the time."""
    rows = random_blocks(kind, (64, size[1]), rng)
    if kind == Type.Q4_0:
        blocks = rows.reshape(64, -1, gguf.GGML_QUANT_SIZES[kind][1])
        scales = rng.normal(0, 4e-3, blocks.shape[:-1]).astype(np.float16)
        blocks[..., :2] = scales[..., None].view(np.uint8)
    return np.ascontiguousarray(np.tile(rows, (size[0] // 64, 1)))
