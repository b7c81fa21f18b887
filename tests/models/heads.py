"""Tiny random heads in their published layouts, and their guesses in plain torch.

The layers are those of one-layer models of transformers, which knows no heads: it gets their inputs as embeddings.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.checkpoints import make_checkpoint, make_config, make_model

_SIZE = 64
_ONE_LAYER = {"num_hidden_layers": 1, "max_position_embeddings": 48}
"""Many published heads name the length of their training texts, which is shorter than those of their models."""
PREDICTING = ("deepseek_v3", "glm4_moe", "mimo")
"""Model types whose checkpoints have a head."""


def make_eagle(folder: Path, *, bias: bool = False, norms: bool = False, seed: int = 5, **overrides: Any) -> Path:
    """Save an EAGLE head for models of 64 hidden elements; `norms`: as HASS has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _eagle_files(bias, norms, seed, json.dumps(overrides)).items():
        (folder / name).write_bytes(content)
    return folder


@functools.lru_cache(maxsize=8)
def _eagle_files(bias: bool, norms: bool, seed: int, overrides: str) -> Mapping[str, bytes]:
    """As `checkpoints._checkpoint_files`."""
    layer = make_model("llama", seed, **{**_ONE_LAYER, **json.loads(overrides)})
    size = layer.config.hidden_size
    tensors = {
        key.removeprefix("model."): value
        for key, value in layer.state_dict().items()
        if key.startswith(("model.layers.", "model.embed_tokens.")) and "input_layernorm" not in key
    }
    tensors |= _ends(size, seed, ("fc", "embedding_layernorm", "hidden_states_layernorm") if norms else ("fc",))
    if bias:
        tensors["fc.bias"] = 0.2 * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    config = {**layer.config.to_dict(), "architectures": ["LlamaForCausalLM"], "add_para_norm": norms}
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "model.safetensors")
        content = (Path(folder) / "model.safetensors").read_bytes()
    return {"config.json": json.dumps(config).encode(), "model.safetensors": content}


def make_eagle3(
    folder: Path,
    *,
    tokens: Sequence[int] | None = None,
    family: str = "llama",
    layers: int = 1,
    seed: int = 5,
    **overrides: Any,
) -> Path:
    """Save an EAGLE 3 head for models of 64 hidden elements and 256 tokens; `tokens`: those that its lm_head has;
    `family`: of its layers."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(family, seed, **_ONE_LAYER | {"num_hidden_layers": layers})
    rng = torch.Generator().manual_seed(seed)
    tensors = {
        key.replace("model.layers.0.", "midlayer.").removeprefix("model."): value
        for key, value in model.state_dict().items()
        if "embed_tokens" not in key
    }
    for name in ("q", "k", "v"):
        key = f"midlayer.self_attn.{name}_proj.weight"
        tensors[key] = torch.randn(len(tensors[key]), 2 * _SIZE, generator=rng) * (2 * _SIZE) ** -0.5
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(_SIZE, generator=rng)
    tensors["fc.weight"] = torch.randn(_SIZE, 3 * _SIZE, generator=rng) * (3 * _SIZE) ** -0.5
    if overrides.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + 0.2 * torch.randn(3 * _SIZE, generator=rng)
    if overrides.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": 1 + 0.2 * torch.randn(_SIZE, generator=rng) for i in range(3)}
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLMEagle3"], **overrides}
    if tokens is not None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][: len(tokens)].contiguous()
        tensors["d2t"] = torch.tensor(tokens) - torch.arange(len(tokens))
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, torch.tensor(tokens), True)
        config["draft_vocab_size"] = len(tokens)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def as_library(head: Path, folder: Path, kind: str, **overrides: Any) -> Path:
    """Save a head as the library `speculators` does."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {"midlayer.": "layers.0."}
    if kind == "eagle":
        names = {"layers.0.": "transformer.", "fc.": "fusion_fc."}
    tensors = load_file(head / "model.safetensors")
    for old, new in names.items():
        tensors = {new + key.removeprefix(old) if key.startswith(old) else key: one for key, one in tensors.items()}
    if kind == "eagle":
        del tensors["embed_tokens.weight"]
    layers = json.loads((head / "config.json").read_text())
    own = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_output", "fc_norm")
    config = {key: layers.pop(key) for key in (*own, "norm_before_fc", "norm_before_residual") if key in layers}
    if kind == "eagle3":
        config = {"draft_vocab_size": layers["vocab_size"], **config}
    config |= {
        "architectures": [f"{kind.capitalize()}Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "some/model", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layers,
        "torch_dtype": layers.pop("dtype", None),
    }
    (folder / "config.json").write_text(json.dumps({**config, **overrides}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_predicting(model_type: str, folder: Path, seed: int = 5, **overrides: Any) -> Path:
    """Save a checkpoint of a model type with its layer for multi-token prediction."""
    family = "qwen2" if model_type == "mimo" else model_type
    make_checkpoint(family, folder, **overrides)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": model_type, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    layer = predicting_layer(model_type, seed, **overrides)
    if model_type == "mimo":
        place, ends = "model.mtp_layers.0", ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    else:
        place, ends = f"model.layers.{config['num_hidden_layers']}", ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    own = {
        key.replace("model.layers.0", place): value
        for key, value in layer.state_dict().items()
        if key.startswith("model.layers.")
    }
    own = _apart(own)
    own |= {f"{place}.{key}": value for key, value in _ends(_SIZE, seed, ends).items()}
    file = folder / "model.safetensors"
    save_file({**load_file(file), **own}, file, {"format": "pt"})
    return folder


def predicting_layer(model_type: str, seed: int = 5, **overrides: Any) -> transformers.PreTrainedModel:
    """A model whose one layer is as the last one of a model type."""
    family = "qwen2" if model_type == "mimo" else model_type
    dense = {} if family == "qwen2" else {"first_k_dense_replace": 0}
    return make_model(family, seed, **{**overrides, "num_hidden_layers": 1, **dense})


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as checkpoints have them: experts one by one."""
    apart: dict[str, Tensor] = {}
    for key, value in tensors.items():
        module, _, name = key.rpartition(".")
        if name == "gate_up_proj":
            for expert, weight in enumerate(value):
                gate, up = weight.chunk(2)
                apart |= {f"{module}.{expert}.gate_proj.weight": gate, f"{module}.{expert}.up_proj.weight": up}
        elif name == "down_proj" and value.dim() == 3:
            apart |= {f"{module}.{expert}.down_proj.weight": weight for expert, weight in enumerate(value)}
        else:
            apart[key] = value
    return {key: value.clone().contiguous() for key, value in apart.items()}


def _ends(size: int, seed: int, names: Sequence[str]) -> dict[str, Tensor]:
    """A projection and norms by their names."""
    generator = torch.Generator().manual_seed(seed + 1)
    projection = torch.randn(size, 2 * size, generator=generator) * (2 * size) ** -0.5
    norms = {f"{name}.weight": 1 + 0.2 * torch.randn(size, generator=generator) for name in names[1:]}
    return {f"{names[0]}.weight": projection, **norms}


class Reference:
    """A model and its head in plain torch."""

    def __init__(self, model: Path, head: Path | None = None) -> None:
        """`head`: of EAGLE; None: the one in the model's checkpoint."""
        config = json.loads((model / "config.json").read_text())
        self._type = config["model_type"] if head is None else "eagle"
        family = "qwen2" if config["model_type"] == "mimo" else config["model_type"]
        values = {key: value for key, value in config.items() if key not in ("model_type", "architectures", "dtype")}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model,
            config=make_config(family, **values),
            dtype="float32",
            attn_implementation="eager",
            experts_implementation="eager",
        ).eval()
        self._tensors = load_file((head or model) / "model.safetensors")
        if head is None:
            self._layers = predicting_layer(self._type)
            place = "model.mtp_layers.0." if self._type == "mimo" else f"model.layers.{config['num_hidden_layers']}."
        else:
            self._layers = make_model("llama", 5, **_ONE_LAYER)
            self._layers.model.layers[0].input_layernorm = nn.Identity()
            place = ""
        self._layers.model.norm = nn.Identity()
        self._tensors = {key.removeprefix(place): value for key, value in self._tensors.items()}
        self._eps = self._model.config.rms_norm_eps

    @torch.no_grad()
    def margins(self, tokens: Sequence[int], guesses: Sequence[int]) -> list[float]:
        """By how much the logit of each guess behind `tokens` is below the best one, if the guesses before it are as
        they are."""
        ids = torch.tensor([list(tokens)])
        embed = self._model.get_input_embeddings()
        rows = self._join(embed(ids[0, 1:]), self._model.model(ids[:, :-1]).last_hidden_state[0])
        margins = []
        for guess in guesses:
            output = self._layers.model(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0, -1:]
            normed, read = self._finish(output)
            logits = self._model.lm_head(normed)[0]
            assert float(logits.std()) > 0.1, "the logits are all alike"
            margins.append(float(logits.max() - logits[guess]))
            rows = torch.cat([rows, self._join(embed(torch.tensor([guess])), read)])
        return margins

    def _join(self, token: Tensor, hidden: Tensor) -> Tensor:
        names = {
            "eagle": ("embedding_layernorm", "hidden_states_layernorm", "fc"),
            "mimo": ("token_layernorm", "hidden_layernorm", "input_proj"),
        }
        token_norm, hidden_norm, projection = names.get(self._type, ("enorm", "hnorm", "eh_proj"))
        if f"{token_norm}.weight" in self._tensors:
            token, hidden = self._norm(token, token_norm), self._norm(hidden, hidden_norm)
        both = torch.cat([hidden, token] if self._type == "mimo" else [token, hidden], dim=-1)
        weight, bias = self._tensors[f"{projection}.weight"], self._tensors.get(f"{projection}.bias")
        return nn.functional.linear(both, weight, bias)

    def _finish(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """What the lm_head reads, and what the head reads behind a guess."""
        if self._type == "eagle":
            return output, output
        if self._type == "mimo":
            normed = self._norm(output, "final_layernorm")
            return normed, normed
        return self._norm(output, "shared_head.norm"), output

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self._tensors[f"{name}.weight"], self._eps)


class Eagle3Reference:
    """As `Reference`, for an EAGLE 3 head."""

    def __init__(self, model: Path, head: Path, sources: Sequence[int]) -> None:
        """`sources`: the layers whose inputs it reads."""
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
        self._tensors, self._sources = load_file(head / "model.safetensors"), sources
        self._config = json.loads((head / "config.json").read_text())
        count = {"num_hidden_layers": self._config["num_hidden_layers"]}
        self._layers = make_model(self._config["model_type"], 5, **_ONE_LAYER | count).model
        self._layers.norm = nn.Identity()
        layer, self._pairs = self._layers.layers[0], _Given()
        layer.input_layernorm = self._pairs
        own = {key.removeprefix("midlayer."): value for key, value in self._tensors.items() if "midlayer" in key}
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.self_attn, name, nn.Linear(2 * _SIZE, len(own[f"self_attn.{name}.weight"]), bias=False))
        norms = {"input_layernorm.weight", "hidden_norm.weight"}
        layer.load_state_dict({key: value for key, value in own.items() if key not in norms})
        rows = len(self._tensors["lm_head.weight"])
        self._token_ids = torch.arange(rows) + self._tensors.get("d2t", torch.zeros(rows, dtype=torch.long))

    @torch.no_grad()
    def margins(self, tokens: Sequence[int], guesses: Sequence[int]) -> list[float]:
        """See `Reference.margins`; of the tokens that the lm_head has."""
        ids = torch.tensor([list(tokens)])
        states = self._model.model(ids[:, :-1], output_hidden_states=True).hidden_states
        read = torch.cat([states[layer][0] for layer in self._sources], -1)
        if self._config.get("fc_norm"):
            read = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(read.chunk(3, -1))], -1)
        if self._config.get("norm_before_fc"):
            read = self._norm(read, "input_norm")
        rows = nn.functional.linear(read, self._tensors["fc.weight"])
        embed, margins = self._model.get_input_embeddings(), []
        behind = embed(ids[0, 1:])
        for guess in guesses:
            normed = self._norm(rows, "midlayer.hidden_norm")
            self._pairs.rows = torch.cat([self._norm(behind, "midlayer.input_layernorm"), normed], -1)[None]
            around = normed if self._config.get("norm_before_residual") else rows
            output = self._layers(inputs_embeds=around[None], use_cache=False).last_hidden_state[0, -1:]
            final = self._norm(output, "norm")
            logits = nn.functional.linear(final, self._tensors["lm_head.weight"])[0]
            output = final if self._config.get("norm_output") else output
            assert float(logits.std()) > 0.1, "the logits are all alike"
            margins.append(float(logits.max() - logits[self._token_ids == guess][0]))
            rows, behind = torch.cat([rows, output]), torch.cat([behind, embed(torch.tensor([guess]))])
        return margins

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self._tensors[f"{name}.weight"], self._config["rms_norm_eps"])


class _Given(nn.Module):
    """Returns rows that it was given, whatever its input is."""

    rows: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.rows
