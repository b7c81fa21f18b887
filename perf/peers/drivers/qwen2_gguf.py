"""A checkpoint of the Qwen2 architecture as a GGUF file in bf16."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def bf16_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and raw bits (uint16) of the tensors in all safetensors files, read by hand: numpy has no bfloat16."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            header_len = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(header_len))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{name} of {file} is {entry['dtype']}; only BF16 checkpoints are converted")
            shape = tuple(entry["shape"])
            offset = 8 + header_len + entry["data_offsets"][0]
            yield name, np.memmap(file, np.uint16, "r", offset, shape)


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        index, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{index}.{_LAYER_NAMES[part]}.{kind}"
    return f"{_OTHER_NAMES[stem]}.{kind}"


def write_bf16(folder: Path, target: Path, *, with_tokens: bool = False) -> None:
    """Write matrices in bf16 and vectors in fp32, like llama.cpp's own converter. `with_tokens`: with a vocabulary,
    which some programs need although token ids go in and out."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "qwen2":
        raise SystemExit(f"only qwen2 checkpoints are converted, not {config['model_type']}")
    writer = gguf.GGUFWriter(target, "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2" if with_tokens else "no_vocab")
    if with_tokens:
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([f"t{token}" for token in range(config["vocab_size"])])
        writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
        writer.add_token_merges(["t 0"])
    for name, bits in bf16_tensors(folder):
        if bits.ndim == 1:
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(gguf_name(name), bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
