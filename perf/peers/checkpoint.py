"""The random-weight checkpoints that every engine is measured on, in bfloat16.

The environment needs transformers: `python perf/peers/checkpoint.py FOLDER [SHAPE]`. SHAPE is q05 (Qwen2.5-0.5B's
shape, the default) or mha (a Llama of 12 layers with 16 heads of 64, each with keys and values of its own).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

COMMON = {
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
Q05 = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
MHA = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}


def main() -> None:
    """Save the checkpoint, unless it exists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", nargs="?", choices=("q05", "mha"), default="q05")
    options = parser.parse_args()
    folder, shape = options.folder, options.shape
    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    network = (
        Qwen2ForCausalLM(Qwen2Config(**COMMON, **Q05))
        if shape == "q05"
        else LlamaForCausalLM(LlamaConfig(**COMMON, **MHA))
    )
    model = network.to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
