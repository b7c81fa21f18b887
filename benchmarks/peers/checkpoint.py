"""The random-weight checkpoint that every engine is measured on: Qwen2.5-0.5B's shape, in bfloat16.

The environment needs transformers: `python benchmarks/peers/checkpoint.py FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def main() -> None:
    """Save the checkpoint, unless it exists."""
    folder = Path(sys.argv[1])
    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
