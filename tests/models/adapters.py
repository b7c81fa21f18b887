"""Random LoRA adapters in PEFT's layout for tiny checkpoints, and what they mean: W + scale * B A, in plain torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEARS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def load_oracle(model: Path) -> PreTrainedModel:
    """transformers' model in fp32."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return loaded.eval()


def expert_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Views [out, in] of the experts' weights, by the names of the linears that checkpoints and adapters have."""
    found: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        if not module_name.endswith(".experts") or not hasattr(module, "gate_up_proj"):
            continue
        gate, up, down = "gate_proj", "up_proj", "down_proj"
        if model.config.model_type == "mixtral":
            module_name, gate, up, down = module_name.replace(".mlp.", ".block_sparse_moe."), "w1", "w3", "w2"
        for expert, (both, last) in enumerate(zip(module.gate_up_proj, module.down_proj, strict=True)):
            own = zip((gate, up, down), (*both.detach().chunk(2), last.detach()), strict=True)
            found |= {f"{module_name}.{expert}.{name}": weight for name, weight in own}
    return found


def make_adapter(
    model: Path,
    folder: Path,
    *,
    targets: Sequence[str] = LINEARS,
    rank: int = 5,
    seed: int = 1,
    ranks: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    prefix: str = "base_model.model.",
    whole: Sequence[str] = (),
    stacked: Sequence[str] = (),
    **config: Any,
) -> Path:
    """Save an adapter of the modules whose names end with one of `targets`, which changes the logits a lot; `ranks`:
    those of some modules, by their names; `whole`: ends of the names of those that are saved whole; `stacked`: names of
    experts' stacked parameters that are targets, as the module has them; `config`: further keys."""
    from transformers.pytorch_utils import Conv1D

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    oracle = load_oracle(model)
    experts: dict[str, nn.Module] = {}
    for name, weight in expert_weights(oracle).items():
        experts[name] = linear = nn.Linear(1, 1)
        linear.weight = nn.Parameter(weight)
    for name, module in (*oracle.named_modules(), *experts.items()):
        if whole and name.endswith(tuple(whole)):
            weight = module.weight.detach()
            tensors[f"{prefix}{name}.weight"] = weight + torch.randn(weight.shape, generator=generator) * weight.std()
        if not isinstance(module, nn.Linear | Conv1D | nn.Embedding) or not name.endswith(tuple(targets)):
            continue
        outputs, inputs = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
        own = next((value for key, value in (ranks or {}).items() if name.endswith(key)), rank)
        down = torch.randn(own, inputs, generator=generator) * inputs**-0.5
        up = torch.randn(outputs, own, generator=generator) * own**-0.5
        if isinstance(module, nn.Embedding):
            a, b, scale = "lora_embedding_A", "lora_embedding_B", float(module.weight.detach().std())
            tensors[f"{prefix}{name}.{a}"], tensors[f"{prefix}{name}.{b}"] = (down * inputs**0.5).to(dtype), up * scale
        else:
            key = f"{prefix}{name}.lora"
            tensors[f"{key}_A.weight"], tensors[f"{key}_B.weight"] = down.to(dtype), up.to(dtype)
        if config.get("use_dora"):
            magnitude = module.weight.detach().norm(dim=int(isinstance(module, nn.Linear)))
            magnitude = magnitude * (0.5 + torch.rand(outputs, generator=generator))
            tensors[f"{prefix}{name}.lora_magnitude_vector"] = magnitude.to(dtype)
    for name, module in oracle.named_modules() if stacked else ():
        for parameter in stacked if name.endswith(".experts") else ():
            count, outputs, inputs = getattr(module, parameter).shape
            if getattr(module, "is_transposed", False):
                outputs, inputs = inputs, outputs
            key = f"{prefix}{name}" + (".base_layer" if parameter != stacked[-1] else "")
            tensors[f"{key}.lora_A.weight"] = torch.randn(count * rank, inputs, generator=generator) * inputs**-0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, rank * count, generator=generator) * rank**-0.5
    assert tensors, "no module has such a name"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    if stacked:
        values["target_parameters"] = [f"experts.{name}" for name in stacked]
    if ranks:
        values["rank_pattern"] = dict(ranks)
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    return folder


def merge(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Add an adapter to the weights of transformers' model."""
    from transformers.pytorch_utils import Conv1D

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    modules, experts = dict(model.named_modules()), expert_weights(model)
    head = model.get_output_embeddings()
    if head is not None:  # an adapter changes it, or the embedding, and not both
        head.weight = nn.Parameter(head.weight.detach().clone())
    for key, down in tensors.items():
        if re.search(r"lora_(embedding_)?B|magnitude", key):
            continue
        name = re.sub(r"^base_model\.model\.|\.lora_A\.weight$|\.lora_embedding_A$|\.weight$", "", key)
        name = name.removesuffix(".lora_A")
        if name.removesuffix(".base_layer").endswith(".experts"):
            _merge_stacked(modules, name, config, down, tensors[key.replace("_A", "_B")])
            continue
        module = modules.get(name)
        weight = experts[name] if module is None else module.weight
        with torch.no_grad():
            if "lora_" not in key:
                weight.copy_(down)
                continue
            up, rank = tensors[key.replace("_A", "_B")].float(), len(down)
            alphas = config.get("alpha_pattern") or {}
            alpha = next((value for end, value in alphas.items() if name.endswith(end)), config["lora_alpha"])
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            change = scale * up @ down.float()
            weight += change.T if isinstance(module, Conv1D | nn.Embedding) else change
            if config.get("use_dora"):
                magnitude = tensors[re.sub(r"lora_A\.weight|lora_embedding_A", "lora_magnitude_vector", key)].float()
                dim = int(not isinstance(module, Conv1D | nn.Embedding))
                weight *= (magnitude[:, None] if dim else magnitude) / weight.norm(dim=dim, keepdim=True)
    return model


def _merge_stacked(
    modules: Mapping[str, Any], name: str, config: Mapping[str, Any], down: torch.Tensor, up: torch.Tensor
) -> None:
    """Add the change of experts' stacked weights as PEFT does: down [experts, rank, in], up [out, rank, experts]."""
    own = [key for key in ("gate_up_proj", "down_proj") if f"experts.{key}" in config["target_parameters"]]
    module = modules[name.removesuffix(".base_layer")]
    weight = getattr(module, own[-1] if name.endswith(".experts") else own[0])
    a, b = down.unflatten(0, (len(weight), -1)), up.unflatten(1, (-1, len(weight)))
    to = "eio" if getattr(module, "is_transposed", False) else "eoi"
    with torch.no_grad():
        weight += torch.einsum(f"ore,eri->{to}", b, a) * config["lora_alpha"] / config["r"]


def write_gguf_adapter(folder: Path, file: Path, arch: str, *, model: Path, dtype: str = "F32") -> Path:
    """Convert an adapter in PEFT's layout, as llama.cpp's converter does; `model`: the checkpoint it is for."""
    config = json.loads((model / "config.json").read_text())
    adapter = json.loads((folder / "adapter_config.json").read_text())
    kind = gguf.GGMLQuantizationType[dtype]
    writer = gguf.GGUFWriter(file, arch)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(adapter["lora_alpha"]))
    (number,) = (n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    tensors = dict(load_file(folder / "adapter_model.safetensors"))
    for key in [key for key in tensors if ".experts.0." in key]:
        each = [key.replace(".experts.0.", f".experts.{number}.") for number in range(9)]
        tensors[key.replace(".experts.0.", ".experts.")] = torch.stack([tensors.pop(one) for one in each])
    for key, tensor in tensors.items():
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?", key)
        assert found is not None, key
        values, is_up = tensor.float().numpy(), found[2] == "B"
        name = names.get_name(f"{found[1]}.weight", (".weight",))
        assert name is not None, key
        if is_up and arch == "llama" and (which := re.search(r"\.([qk])_proj$", found[1])):
            heads = config["num_attention_heads" if which[1] == "q" else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if not is_up and name.startswith("token_embd"):
            values = values.T.copy()
        stored = gguf.quantize(values, kind)
        writer.add_tensor(f"{name}.lora_{'b' if is_up else 'a'}", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
