"""Every model type against transformers: same parameters, same defaults, same logits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace

from shardline.checkpoints.checkpoint import Checkpoint
from shardline.checkpoints.lookup import decoder_spec, family, known_families
from shardline.models.parameters import parameters
from shardline.models.spec import DecoderSpec
from shardline.runtime.loader.weights import CheckpointWeights
from tests.models.checkpoints import (
    FAMILIES,
    LIKE_OTHERS,
    OWN_PARTS,
    VARIANTS,
    make_checkpoint,
    make_config,
    make_variant,
    whole_tensors,
)
from tests.models.reference import forward


def _spec(folder: Path, max_model_len: int | None) -> DecoderSpec:
    return decoder_spec(json.loads((folder / "config.json").read_text()), max_model_len)


_OTHER_NAMES = {
    "kimi_k2": "deepseek_v3",
    "mimo": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Model types that transformers has no class for, or only inside a wrapper (`test_wrappers`)."""


def test_every_family_is_tested_and_named_in_the_documentation() -> None:
    assert tuple(sorted([*FAMILIES, *_OTHER_NAMES])) == known_families()
    page = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text()
    listed = page.partition("values of `model_type`:")[2].split("\n\n")[1].replace(" (also Phi-4)", "")
    assert tuple(" ".join(listed.split()).split(", ")) == known_families()


@pytest.mark.parametrize(("model_type", "family_name"), _OTHER_NAMES.items())
def test_other_names_of_a_family(model_type: str, family_name: str) -> None:
    config = {**make_config(family_name).to_dict(), "norm_topk_prob": True}
    spec = decoder_spec({**config, "model_type": family_name})
    assert replace(decoder_spec({**config, "model_type": model_type}), model_type=family_name) == spec


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_same_parameters_and_logits_as_transformers(name: str, tmp_path: Path) -> None:
    sharding = {"max_shard_size": "60KB"} if len(name) % 2 else {}
    folder = make_variant(name, tmp_path, **sharding)
    assert len(list(folder.glob("*.safetensors"))) > 1 or not sharding
    _assert_same_as_transformers(folder, VARIANTS[name].prompt_len)


_SEEDS = [
    (name, seed)
    for name in FAMILIES
    for seed in ((1,) if name in (*LIKE_OTHERS, *OWN_PARTS) else range(2))
    if name != "mistral4"  # its rope parameters follow from its sizes
]


@pytest.mark.slow
@pytest.mark.parametrize(("family_name", "seed"), _SEEDS)
def test_random_shapes(family_name: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{family_name} {seed}")
    shape: dict[str, Any]
    if family_name == "gpt2":
        num_heads = rng.choice([1, 3, 5])
        shape = {"n_head": num_heads, "n_embd": 10 * num_heads, "n_layer": rng.randint(1, 3), "n_inner": 37}
    else:
        num_kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 5])
        shape = {
            "num_attention_heads": num_kv_heads * group,
            "num_key_value_heads": num_kv_heads,
            "hidden_size": 8 * num_kv_heads * group,
            "head_dim": rng.choice([4, 10, 16]),
            "num_hidden_layers": rng.randint(1, 6),
            "intermediate_size": rng.randint(5, 90),
            "tie_word_embeddings": rng.random() < 0.5,
        }
        if family_name in ("phi3", "olmo2", "olmo3", "granite", "cohere2", "smollm3", "ernie4_5_moe", "exaone4"):
            del shape["head_dim"]
        if family_name.startswith("deepseek") or family_name == "glm_moe_dsa":
            del shape["head_dim"]
            shape |= {
                "num_key_value_heads": shape["num_attention_heads"],
                "q_lora_rank": rng.choice([6, 17] if family_name in ("deepseek_v32", "glm_moe_dsa") else [None, 6, 17]),
                # transformers' V2 rotates by complex numbers, which need even strides.
                "kv_lora_rank": rng.choice([6, 16, 34] if family_name == "deepseek_v2" else [5, 16, 33]),
                "qk_nope_head_dim": rng.randint(1, 10) * (2 if family_name == "deepseek_v2" else 1),
                "qk_rope_head_dim": rng.choice([2, 6, 16]),
                "v_head_dim": rng.randint(1, 20),
            }
        if family_name.startswith("glm4"):
            shape["head_dim"] *= 2  # half of it is rotated
        if family_name == "minimax_m2":
            shape["rotary_dim"] = 4
    if family_name == "mimo_v2_flash":
        shape |= {
            "num_attention_heads": 2 * shape["num_key_value_heads"],  # windowed layers have twice the KV heads
            "head_dim": rng.choice([12, 24]),  # a third of it is rotated
            "v_head_dim": rng.randint(1, 20),
        }
    if family_name in ("gemma4_text", "nemotron_h", "mimo_v2_flash") or family_name.startswith("qwen3_5"):
        del shape["num_hidden_layers"]  # its kinds of layers are listed
    if family_name.startswith("qwen3_5"):
        shape |= {
            "head_dim": rng.choice([8, 16, 24]),  # a quarter of it is rotated
            "linear_num_key_heads": rng.choice([1, 2, 3]),
            "linear_num_value_heads": rng.choice([6, 12]),
            "linear_key_head_dim": rng.randint(1, 20),
            "linear_value_head_dim": rng.randint(1, 20),
            "linear_conv_kernel_dim": rng.randint(1, 5),
        }
    if family_name in ("mistral", "gemma2", "gemma3_text", "gpt_oss", "olmo3", "cohere2"):
        shape["sliding_window"] = rng.randint(1, 20)
    _assert_same_as_transformers(make_checkpoint(family_name, tmp_path, seed=seed, **shape), prompt_len=24)


def _assert_same_as_transformers(folder: Path, prompt_len: int) -> None:
    spec = _spec(folder, prompt_len)
    checkpoint = Checkpoint.open(folder)
    tensor_source = family(spec.model_type).tensor_source
    sources = {parameter: tensor_source(parameter, spec) for parameter, _ in parameters(spec)}
    assert {checkpoint.place(source).key for source in sources.values()} == set(checkpoint.tensors)
    weights = whole_tensors(CheckpointWeights(checkpoint, spec, torch.float32), spec)
    assert {parameter: tuple(tensor.shape) for parameter, tensor in weights.items()} == dict(parameters(spec))
    assert sum(tensor.numel() for tensor in weights.values()) * 4 == sum(
        entry.num_bytes for entry in checkpoint.tensors.values()
    )

    token_ids = torch.randint(0, 256, (prompt_len,), generator=torch.Generator().manual_seed(1))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    )
    # In float64, so that the order of torch's sums, which depends on the machine, does not matter.
    with torch.no_grad():
        expected = model.double()(token_ids[None]).logits[0].double()  # some models round logits
        actual = forward(spec, {name: weight.double() for name, weight in weights.items()}, token_ids)
    assert expected.std() > 0.1
    # But transformers computes linear attention in float32.
    tolerance = 1e-4 if spec.keeps_states else 2e-5
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance / 2)


@pytest.mark.parametrize("family_name", FAMILIES)
def test_missing_keys_take_the_defaults_of_transformers(family_name: str) -> None:
    needed: dict[str, dict[str, Any]] = {"deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128}}
    required = needed.get(family_name, {})
    defaults = type(make_config(family_name))(**required)
    spelled_out = {**defaults.to_dict(), "dtype": "float32"}
    assert decoder_spec({"model_type": family_name, **required}) == decoder_spec(spelled_out)


def test_gpt2_checkpoints_without_a_prefix_load(tmp_path: Path) -> None:
    model = transformers.AutoModel.from_config(make_config("gpt2"))
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.has("wte.weight")
    expected = model.get_parameter("h.1.attn.c_attn.weight")[:, 64:128].T
    spec = _spec(tmp_path, None)
    weights = CheckpointWeights(checkpoint, spec, torch.float32)
    assert torch.equal(weights.get("layers.1.attention.k.weight", (None, None)), expected)
