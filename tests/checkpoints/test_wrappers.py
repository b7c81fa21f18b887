"""Models of text and images: their language models against transformers, whose checkpoints have vision weights too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from shardline.checkpoints.checkpoint import Checkpoint
from shardline.checkpoints.description import read_model
from shardline.checkpoints.hub import resolve_model
from shardline.checkpoints.lookup import decoder_spec
from shardline.config.engine import ModelConfig
from shardline.runtime.loader.weights import CheckpointWeights
from tests.models.checkpoints import make_checkpoint, make_config, randomize, whole_tensors
from tests.models.reference import forward

_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
                "deepstack_visual_indexes": [0]}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 3000.0, "mrope_section": [6, 3, 3]}
_WRAPPERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    # wrapper: (auto model class, family of the text model, its overrides, vision_config)
    "gemma3": ("Gemma3", "gemma3_text", {}, _VISION),
    "gemma4": ("Gemma4", "gemma4_text", {"enable_moe_block": False}, {"head_dim": 8, **_VISION}),
    "mistral3": ("Mistral3", "mistral", {"sliding_window": None}, {"model_type": "pixtral", "head_dim": 8, **_VISION}),
    "qwen3_vl": ("Qwen3VL", "qwen3", {"rope_parameters": _MROPE, "attention_bias": True}, _QWEN_VISION),
    "qwen3_vl_moe": ("Qwen3VLMoe", "qwen3_moe", {"rope_parameters": _MROPE, "mlp_only_layers": [1]}, _QWEN_VISION),
}
_TEXT_TYPES = {"qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text"}


def _make_wrapper(name: str, folder: Path, *, tied: bool) -> transformers.PreTrainedModel:
    prefix, family, overrides, vision = _WRAPPERS[name]
    text = make_config(family, **overrides).to_dict()
    text["model_type"] = _TEXT_TYPES.get(name, family)
    config_class = getattr(transformers, f"{prefix}Config")
    config = config_class(text_config=text, vision_config=vision, tie_word_embeddings=tied, image_token_id=200)
    config.dtype = "float32"
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    randomize(model, 0)
    model.tie_weights()
    model.eval().save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", _WRAPPERS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_language_model_is_that_of_transformers(name: str, tied: bool, tmp_path: Path) -> None:
    model = _make_wrapper(name, tmp_path, tied=tied)
    spec = decoder_spec(json.loads((tmp_path / "config.json").read_text()))
    assert spec.tied_embeddings == tied
    _rewrite(tmp_path / "model.safetensors", older_keys=not tied)
    weights = whole_tensors(CheckpointWeights(Checkpoint.open(tmp_path), spec, torch.float32), spec)
    token_ids = torch.randint(0, 199, (24,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=token_ids[None]).logits[0]
        actual = forward(spec, weights, token_ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)


def test_kimi_is_deepseek_v3(tmp_path: Path) -> None:
    """transformers cannot save the keys of kimi_k25 as they are on the hub."""
    plain = make_checkpoint("deepseek_v3", tmp_path / "plain")
    config = json.loads((plain / "config.json").read_text())
    wrapper = {"model_type": "kimi_k25", "text_config": {**config, "model_type": "kimi_k2"}}
    tensors = load_file(plain / "model.safetensors")
    save_file({f"language_model.{key}": tensor for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    loaded = []
    for folder, content in ((plain, config), (tmp_path, wrapper)):
        spec = decoder_spec(content)
        loaded.append(whole_tensors(CheckpointWeights(Checkpoint.open(folder), spec, torch.float32), spec))
    assert loaded[0].keys() == loaded[1].keys()
    assert all(torch.equal(tensor, loaded[1][name]) for name, tensor in loaded[0].items())


def test_a_model_that_was_saved_without_its_head_embeds(tmp_path: Path) -> None:
    """As most models that embed are: transformers' AutoModel writes no `model.` and no lm_head."""
    plain = make_checkpoint("qwen3", tmp_path / "plain", tie_word_embeddings=False)
    content = json.loads((plain / "config.json").read_text())
    tensors = load_file(plain / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file({key.removeprefix("model."): one for key, one in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = read_model(ModelConfig(model=str(tmp_path), runner="pooling"))
    found = whole_tensors(CheckpointWeights(model.checkpoint, model.spec(), torch.float32), model.spec())  # type: ignore[arg-type]
    spec = decoder_spec(content)
    whole = whole_tensors(CheckpointWeights(Checkpoint.open(plain), spec, torch.float32), spec)
    assert whole.keys() - found.keys() == {"lm_head.weight"}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in found.items())
    assert not read_model(ModelConfig(model=str(tmp_path))).spec().tied_embeddings, "no text is made without the head"


def _rewrite(file: Path, *, older_keys: bool) -> None:
    """Store the tensors as published checkpoints do: the language model's keys may have another beginning, and stacked
    experts are [experts, in, out]."""
    rewritten = {}
    for key, tensor in load_file(file).items():
        older = key.replace("model.language_model.", "language_model.model.")
        older = older.replace("lm_head", "language_model.lm_head") if key == "lm_head.weight" else older
        is_stacked = key.endswith(("experts.gate_up_proj", "experts.down_proj"))
        rewritten[older if older_keys else key] = tensor.transpose(1, 2).contiguous() if is_stacked else tensor
    save_file(rewritten, file)


def test_the_end_of_a_sequence_may_be_in_the_text_configuration(tmp_path: Path) -> None:
    text = {"model_type": "mistral", "eos_token_id": [5, 6]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": text}))
    assert resolve_model(str(tmp_path), weights=False).eos_token_ids == (5, 6)


def test_an_unknown_text_model_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": {"model_type": "x"}}))
    with pytest.raises(ValueError, match="model_type 'x' is not supported"):
        resolve_model(str(tmp_path), weights=False)
