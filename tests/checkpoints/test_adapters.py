"""Adapters as PEFT stores them: what is read, and what is refused by name."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled
from safetensors.torch import load_file, save_file

from shardline.checkpoints.adapter_targets import chosen_kinds
from shardline.checkpoints.adapters import find_adapter, read_adapter, state_of
from shardline.checkpoints.description import read_model
from shardline.checkpoints.lookup import decoder_spec
from shardline.config.engine import HubAccess, ModelConfig
from shardline.models.spec import DecoderSpec
from tests.models.adapters import make_adapter, write_gguf_adapter
from tests.models.checkpoints import make_checkpoint, make_config

EMBED = "base_model.model.model.embed_tokens.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def spec(model: Path) -> DecoderSpec:
    return read_model(ModelConfig(model=str(model))).spec()


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    return make_adapter(model, tmp_path / "adapter", targets=["q_proj", "down_proj"], rank=4)


def change_config(adapter: Path, **values: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def change_tensors(adapter: Path, change: Any) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


def test_ranks_and_scales(model: Path, spec: DecoderSpec, tmp_path: Path) -> None:
    folder = make_adapter(
        model,
        tmp_path / "patterns",
        targets=["q_proj", "v_proj"],
        rank=4,
        ranks={"layers.2.self_attn.v_proj": 9},
        alpha_pattern={"v_proj": 27.0, "^model.layers.0.self_attn.q_proj$": 1.0},
        use_rslora=True,
    )
    found = {one.name: (one.rank, one.scale) for one in read_adapter(folder, spec, 9).linears}
    assert found["layers.2.attention.v.weight"] == (9, 9.0)
    assert found["layers.1.attention.v.weight"] == (4, 13.5)
    assert found["layers.0.attention.q.weight"] == (4, 0.5)
    assert found["layers.1.attention.q.weight"] == (4, 4.0)
    assert len(found) == 8
    with pytest.raises(ValueError, match=r"its rank is 9, and at most 8 is allowed \(--max-lora-rank\)"):
        read_adapter(folder, spec, 8)


def test_keys_of_wrappers_and_older_files(model: Path, spec: DecoderSpec, adapter: Path) -> None:
    names = {one.name for one in read_adapter(adapter, spec, 4).linears}
    change_tensors(adapter, lambda old: {key.removeprefix("base_model.model."): value for key, value in old.items()})
    assert {one.name for one in read_adapter(adapter, spec, 4).linears} == names
    change_tensors(
        adapter,
        lambda old: {f"base_model.model.{key.replace('model.', 'model.language_model.', 1)}": old[key] for key in old},
    )
    assert {one.name for one in read_adapter(adapter, spec, 4).linears} == names


def test_the_digest_is_of_the_content(model: Path, spec: DecoderSpec, adapter: Path, tmp_path: Path) -> None:
    digest = read_adapter(adapter, spec, 4).digest()
    same = make_adapter(model, tmp_path / "same", targets=["q_proj", "down_proj"], rank=4)
    assert read_adapter(same, spec, 4).digest() == digest
    change_config(same, lora_alpha=3)
    assert read_adapter(same, spec, 4).digest() != digest
    other = make_adapter(model, tmp_path / "other", targets=["q_proj", "down_proj"], rank=4, seed=9)
    assert read_adapter(other, spec, 4).digest() != digest


def test_whole_modules_fit_into_a_slot(model: Path, spec: DecoderSpec, tmp_path: Path) -> None:
    folder = make_adapter(model, tmp_path / "whole", targets=["q_proj"], rank=1, whole=["lm_head", "embed_tokens"])
    change_tensors(
        folder,
        lambda old: {**old, "base_model.model.model.embed_tokens.base_layer.weight": old[EMBED].clone()},
    )
    adapter = read_adapter(folder, spec, 16)
    assert [one.name for one in adapter.wholes] == ["embed.weight", "lm_head.weight"]
    with pytest.raises(ValueError, match=r"whole modules need the memory of an adapter of rank (\d+)") as error:
        read_adapter(folder, spec, 1)
    needed = int(re.findall(r"of rank (\d+)", str(error.value))[0])
    assert 1 < needed <= 16
    assert read_adapter(folder, spec, needed) == adapter


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "IA3"}, "of type 'IA3', and only LORA"),
        ({"use_dora": True}, "has no lora_magnitude_vector, and use_dora is true in adapter_config.json"),
        ({"use_dora": "yes"}, "malformed"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias 'all' changes biases"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"target_parameters": 5}, "malformed"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "has changed the base weights"),
        ({"r": 5}, "has rank 5 in adapter_config.json, but lora_A"),
        ({"r": 2**70}, "has rank 1180591620717411303424 in adapter_config.json"),
        ({"lora_alpha": "large"}, "malformed"),
        ({"lora_alpha": 1e39}, "alpha is 1e+39"),
        ({"alpha_pattern": {"q_proj": -1e39}}, "alpha is -1e+39"),
        ({"rank_pattern": {"(a+)+$": 3}}, "is a regular expression"),
        ({"alpha_pattern": {"q_proj": None}}, "malformed"),
    ],
    ids=str,
)
def test_configurations_that_are_refused(
    spec: DecoderSpec, adapter: Path, values: dict[str, Any], message: str
) -> None:
    change_config(adapter, **values)
    with pytest.raises(ValueError, match=r"the adapter in .* cannot be used: ") as error:
        read_adapter(adapter, spec, 64)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def renamed(old: dict[str, torch.Tensor], word: str, new: str) -> dict[str, torch.Tensor]:
    return {key.replace(word, new): value for key, value in old.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda old: renamed(old, "layers.3.", "layers.4."), "it changes model.layers.4."),
        (lambda old: renamed(old, "model.layers.0.mlp.down_proj", "lm_head"), "adapter is of another model"),
        (lambda old: renamed(old, "layers.0.mlp.down_proj", "norm"), "it changes model.norm, which"),
        (lambda old: renamed(old, "lora_A.weight", "lora_C.weight"), "neither lora_A nor lora_B"),
        (lambda old: {**old, "base_model.model.lm_head.weight": torch.ones(2, 2)}, "a vocabulary of their own"),
        (
            lambda old: {**old, "base_model.model.model.layers.0.self_attn.k_proj.weight": torch.ones(2, 2)},
            "only an embedding and lm_head may be whole",
        ),
        (lambda old: {**old, "base_model.model.lm_head.bias": torch.ones(2)}, "neither lora_A nor lora_B"),
        (lambda old: {key: value for key, value in old.items() if "lora_A" in key}, "only one of lora_A and lora_B"),
        (lambda old: {key: value[:, :-1].contiguous() for key, value in old.items()}, "adapter is of another model"),
        (lambda old: {key: value[:3].contiguous() for key, value in old.items()}, "has rank 4 in adapter_config"),
        (lambda old: {key: value.int() for key, value in old.items()}, "has type I32"),
        (lambda old: {}, "it changes no linear"),
    ],
    ids=[
        "layer",
        "lm_head",
        "norm",
        "kind",
        "vocabulary",
        "whole",
        "bias",
        "half",
        "inputs",
        "outputs",
        "type",
        "nothing",
    ],
)
def test_tensors_that_are_refused(spec: DecoderSpec, adapter: Path, change: Any, message: str) -> None:
    change_tensors(adapter, change)
    with pytest.raises(ValueError, match="cannot be used") as error:
        read_adapter(adapter, spec, 64)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("values", "magnitude", "message"),
    [
        ({"use_dora": False}, None, "has a lora_magnitude_vector, but use_dora is false"),
        ({}, torch.ones(7), r"has lora_magnitude_vector [7], and lora_B has"),
        ({}, torch.ones(2, 2), "has lora_magnitude_vector [2, 2], and lora_B has"),
        ({}, torch.ones(64, dtype=torch.int32), "has type I32"),
    ],
)
def test_magnitudes_that_are_refused(
    model: Path, spec: DecoderSpec, values: dict[str, Any], magnitude: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    folder = make_adapter(model, tmp_path / "dora", targets=["o_proj"], rank=4, use_dora=True)
    found = read_adapter(folder, spec, 4).linears
    assert all(one.magnitude is not None and one.magnitude.shape == one.up.shape[:1] for one in found)
    change_config(folder, **values)
    if magnitude is not None:
        change_tensors(folder, lambda old: {key: magnitude.clone() if "magnitude" in key else old[key] for key in old})
    with pytest.raises(ValueError, match="cannot be used") as error:
        read_adapter(folder, spec, 4)
    assert message in str(error.value)


def test_magnitudes_of_embeddings(model: Path, spec: DecoderSpec, tmp_path: Path) -> None:
    folder = make_adapter(model, tmp_path / "dora", targets=["embed_tokens"], use_dora=True)
    [found] = read_adapter(folder, spec, 64).linears
    assert found.magnitude is not None
    assert found.magnitude.shape == (64,)
    change_tensors(folder, lambda old: {**old, f"{EMBED.removesuffix('weight')}lora_magnitude_vector": torch.ones(256)})
    with pytest.raises(ValueError, match=r"has lora_magnitude_vector \[256\], and lora_B has 64 rows"):
        read_adapter(folder, spec, 64)


def test_experts(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path / "model")
    spec = read_model(ModelConfig(model=str(model))).spec()
    folder = make_adapter(model, tmp_path / "each", targets=["experts.8.up_proj"], rank=4)
    found = [one.name for one in read_adapter(folder, spec, 4).linears]
    assert found == [f"layers.{layer}.feed_forward.experts.8.up.weight" for layer in (0, 2, 3)]
    with pytest.raises(ValueError, match=r"changes the expert layers\.0\.feed_forward\.experts\.8\.up, which"):
        read_adapter(folder, spec, 4, experts=False)
    change_tensors(folder, lambda old: renamed(old, "layers.2.mlp.experts.8.", "layers.2.mlp.experts.9."))
    with pytest.raises(ValueError, match=r"it changes model\.layers\.2\.mlp\.experts\.9\.up_proj, which this model"):
        read_adapter(folder, spec, 4)
    change_tensors(folder, lambda old: renamed(old, "layers.2.mlp.experts.9.up_proj", "layers.2.mlp.gate"))
    with pytest.raises(ValueError, match=r"it changes model\.layers\.2\.mlp\.gate, which .* routers"):
        read_adapter(folder, spec, 4)


@pytest.mark.parametrize(
    ("family", "targets", "kinds"),
    [
        ("llama", ["qkv_proj", "mlp.down_proj"], ["attention.k", "attention.q", "attention.v", "feed_forward.down"]),
        ("phi3", ["qkv_proj"], ["attention.k", "attention.q", "attention.v"]),
        ("gemma2", ["embed_tokens", "lm_head"], ["embed", "lm_head"]),
        ("qwen3_moe", ["experts.gate_up_proj"], ["feed_forward.experts.gate", "feed_forward.experts.up"]),
        ("mixtral", ["experts"], [f"feed_forward.experts.{part}" for part in ("down", "gate", "up")]),
        ("qwen2_moe", ["shared_expert.up_proj", "w"], None),
    ],
)
def test_kinds_by_the_names_of_modules(family: str, targets: list[str], kinds: list[str] | None) -> None:
    found = decoder_spec(make_config(family).to_dict())
    if kinds is not None:
        assert sorted(chosen_kinds(found, tuple(targets))) == kinds
        return
    with pytest.raises(ValueError, match=r"names .w., and qwen2_moe has no such modules .* experts, gate_proj"):
        chosen_kinds(found, tuple(targets))


def test_stacked_experts(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path / "model")
    spec = read_model(ModelConfig(model=str(model))).spec()
    make: dict[str, Any] = {"targets": (), "rank": 4, "stacked": ("gate_up_proj", "down_proj")}
    folder = make_adapter(model, tmp_path / "stacked", **make)
    linears = read_adapter(folder, spec, 4).linears
    assert len(linears) == 3 * 9 * 3
    assert {(one.rank, one.num_experts) for one in linears} == {(4, 9)}
    as_peft_writes = {".*\\.gate_up_proj": 4}  # where `target_modules` names gate_proj and up_proj
    change_config(folder, rank_pattern=as_peft_writes, alpha_pattern=as_peft_writes)
    scales = {"down": 2.0, "gate": 1.0, "up": 1.0}
    for one in read_adapter(folder, spec, 4).linears:
        assert one.scale == scales[one.name.split(".")[-2]]
    change_config(folder, rank_pattern={"down_proj": 3})
    with pytest.raises(ValueError, match=r"experts has rank 3 for each of 9 experts in adapter_config\.json"):
        read_adapter(folder, spec, 4)
    change_config(folder, rank_pattern={}, target_parameters=["experts.down_proj"])
    with pytest.raises(ValueError, match=r"it changes model\.layers\.0\.mlp\.experts\.base_layer, which this model"):
        read_adapter(folder, spec, 4)
    change_config(folder, target_parameters=["experts.gate_up_proj"])
    with pytest.raises(ValueError, match=r"\[40, 64\] of this model needs \[rank, in\]"):
        read_adapter(folder, spec, 4)
    key = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_magnitude_vector"
    change_config(folder, target_parameters=["experts.gate_up_proj", "experts.down_proj"], use_dora=True)
    change_tensors(folder, lambda old: {**old, key: torch.ones(80)})
    with pytest.raises(ValueError, match="DoRA of stacked experts"):
        read_adapter(folder, spec, 4)


def test_broken_folders(spec: DecoderSpec, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path / "nowhere", spec, 64)
    weights = adapter / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="corrupt or truncated"):
        read_adapter(adapter, spec, 64)
    weights.unlink()
    (adapter / "adapter_model.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"no adapter_model\.safetensors \(adapter_model\.bin may run code"):
        read_adapter(adapter, spec, 64)
    for config in ("", "[" * 100_000, "{}", '{"peft_type": "LORA"}'):
        (adapter / "adapter_config.json").write_text(config)
        with pytest.raises(ValueError, match=r"adapter_config\.json is malformed"):
            read_adapter(adapter, spec, 64)
    (adapter / "adapter_config.json").write_text(" " * ((1 << 20) + 1))
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        read_adapter(adapter, spec, 64)


def test_gguf_files(model: Path, spec: DecoderSpec, adapter: Path, tmp_path: Path) -> None:
    file = write_gguf_adapter(adapter, tmp_path / "own.gguf", "llama", model=model, dtype="F16")
    found = {one.name: (one.rank, one.scale) for one in read_adapter(file, spec, 4).linears}
    assert found == {one.name: (one.rank, one.scale) for one in read_adapter(adapter, spec, 4).linears}
    same = tmp_path / "same.gguf"
    same.write_bytes(file.read_bytes())
    assert read_adapter(same, spec, 4).digest() == read_adapter(file, spec, 4).digest()
    assert state_of(file) == state_of(file) != state_of(same)
    other = make_checkpoint("qwen2", tmp_path / "other", hidden_size=96)
    with pytest.raises(ValueError, match="the adapter is of another model"):
        read_adapter(file, read_model(ModelConfig(model=str(other))).spec(), 4)
    with pytest.raises(ValueError, match="its rank is 4, and at most 3"):
        read_adapter(file, spec, 3)
    rounded = write_gguf_adapter(
        make_adapter(model, tmp_path / "wide", targets=["q_proj"], rank=32), same, "llama", model=model, dtype="Q8_0"
    )
    with pytest.raises(ValueError, match="has type Q8_0; supported: F32, F16, BF16"):
        read_adapter(rounded, spec, 64)
    for change, message in (
        (lambda data: data.replace(b"adapter.type", b"adapter.tipe"), "do not say that it is a LoRA adapter"),
        (lambda data: data.replace(b"adapter.lora.alpha", b"adapter.lora.alpho"), "adapter.lora.alpha is None"),
        (lambda data: data.replace(b"blk.3.ffn_down", b"blk.4.ffn_down"), "it changes blk.4.ffn_down"),
        (lambda data: data.replace(b"blk.3.ffn_down.weight.lora_a", b"blk.3.ffn_down.weight.lora_c"), "only one of"),
        (lambda data: data[:-9], "own.gguf"),
    ):
        broken = tmp_path / "broken" / "own.gguf"
        broken.parent.mkdir(exist_ok=True)
        broken.write_bytes(change(file.read_bytes()))
        with pytest.raises(ValueError, match="cannot be used") as error:
            read_adapter(broken, spec, 64)
        assert message in str(error.value)
    with pytest.raises(ValueError, match="cannot be"):
        read_adapter(tmp_path / "nowhere.gguf", spec, 64)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ValueError, match="it is no file"):  # instead of waiting for what is written to it
        read_adapter(tmp_path / "pipe.gguf", spec, 64)


def test_an_adapter_may_be_a_repository_of_the_hub(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", Mock(side_effect=OfflineModeIsEnabled("offline")))
    snapshot = tmp_path / "models--some--lora" / "snapshots" / ("a" * 40)
    shutil.copytree(adapter, snapshot)
    (tmp_path / "models--some--lora" / "refs").mkdir()
    (tmp_path / "models--some--lora" / "refs" / "main").write_text("a" * 40)
    hub = HubAccess(folder=str(tmp_path))
    assert find_adapter("some/lora", hub) == snapshot
    assert find_adapter(str(adapter), hub) == adapter
    assert find_adapter("./some/lora", hub) == Path("some/lora").resolve()
    with pytest.raises(ValueError, match="model 'some/other': there is no such folder"):
        find_adapter("some/other", hub)
