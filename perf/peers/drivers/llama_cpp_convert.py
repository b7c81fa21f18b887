"""The checkpoint as llama.cpp's GGUF: `llama_cpp_convert.py FOLDER PRECISION` writes it once and prints its path.

Qwen2 architecture, no tokenizer (token ids go in and out). Written in bf16 from the safetensors, then quantized by
llama.cpp itself: int8 is Q8_0, int4 is Q4_0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from protocol import converted_folder, refuse_other_than

_QUANTIZED = {"int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}
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


def gguf_path(folder: str, precision: str) -> Path:
    """The file of this precision."""
    return converted_folder(folder, "gguf") / f"{precision}.gguf"


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


def write_bf16(folder: Path, target: Path) -> None:
    """Write matrices in bf16 and vectors in fp32, like llama.cpp's own converter."""
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
    writer.add_tokenizer_model("no_vocab")
    for name, bits in bf16_tensors(folder):
        if bits.ndim == 1:
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(gguf_name(name), bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write the missing files; print the path."""
    folder, precision = sys.argv[1:3]
    refuse_other_than(precision, ["bf16", *_QUANTIZED])
    path, bf16 = gguf_path(folder, precision), gguf_path(folder, "bf16")
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    if not bf16.exists():
        write_bf16(Path(folder), unfinished)
        unfinished.rename(bf16)
    if not path.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = _QUANTIZED[precision]
        if llama_cpp.llama_model_quantize(str(bf16).encode(), str(unfinished).encode(), params) != 0:
            raise SystemExit(f"llama.cpp could not quantize {bf16}")
        unfinished.rename(path)
    print(path)


if __name__ == "__main__":
    main()
