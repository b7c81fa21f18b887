"""Models with adapters against transformers' model with merged weights, in fp32."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from shardline.messages.adapters import LoadAdapter, LookAtAdapter
from shardline.messages.request import AdapterRef
from shardline.runtime.loader.adapters import AdapterLoader
from tests.models.adapters import LINEARS, load_oracle, make_adapter, merge, write_gguf_adapter
from tests.models.checkpoints import make_checkpoint
from tests.runtime.test_against_transformers import generate

WHOLE = ("embed_tokens", "lm_head")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all linears": ("llama", {}),
    "some, with patterns": (
        "qwen2",
        {
            "targets": ("q_proj", "v_proj", "down_proj"),
            "ranks": {"v_proj": 1, "layers.1.mlp.down_proj": 8},
            "alpha_pattern": {"q_proj": 3.0},
        },
    ),
    "rslora in bf16": ("llama", {"rank": 16, "use_rslora": True, "dtype": torch.bfloat16}),
    "fused": ("phi3", {"targets": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}),
    "transposed": ("gpt2", {"targets": ("c_attn", "c_proj", "c_fc")}),
    "latent attention": (
        "deepseek_v3",
        {"targets": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "layers.0.mlp.up_proj")},
    ),
    "embedding and head": ("llama", {"targets": ("embed_tokens", "lm_head", "q_proj")}),
    "tied embedding": ("gemma3_text", {"targets": ("embed_tokens",)}),
    "tied head in bf16": ("gemma2", {"targets": ("lm_head",), "dtype": torch.bfloat16}),
    "whole embedding and head": (
        "llama",
        {"targets": ("down_proj",), "whole": WHOLE, "modules_to_save": WHOLE},
    ),
    "dora": ("llama", {"targets": (*LINEARS, "lm_head"), "use_dora": True}),
    "dora in bf16 of some, with biases": (
        "qwen2",
        {"targets": ("q_proj", "up_proj", "down_proj"), "use_dora": True, "use_rslora": True, "dtype": torch.bfloat16},
    ),
    "dora, fused": ("phi3", {"targets": ("qkv_proj", "gate_up_proj"), "use_dora": True}),
    "dora of a tied head": ("gemma2", {"targets": ("lm_head",), "use_dora": True}),
    "dora of the embedding": ("llama", {"targets": ("embed_tokens", "lm_head", "q_proj"), "use_dora": True}),
    "dora of a tied, scaled embedding in bf16": (
        "gemma3_text",
        {"targets": ("embed_tokens",), "use_dora": True, "dtype": torch.bfloat16},
    ),
    "dora, transposed": ("gpt2", {"targets": ("c_attn", "c_proj", "c_fc"), "use_dora": True}),
    "experts": ("qwen3_moe", {"targets": ("q_proj", *LINEARS[4:])}),
    "experts of some layers in bf16, with patterns": (
        "mixtral",
        {"targets": ("layers.1.block_sparse_moe.experts.3.w1", "w2"), "ranks": {"w1": 9}, "dtype": torch.bfloat16},
    ),
    "stacked experts": ("qwen3_moe", {"targets": ("o_proj",), "stacked": ("gate_up_proj", "down_proj")}),
    "transposed experts, with biases": ("gpt_oss", {"targets": ("q_proj",), "stacked": ("gate_up_proj",)}),
    "dora of experts": ("qwen3_moe", {"targets": ("up_proj", "down_proj"), "use_dora": True}),
    "linear attention": ("qwen3_5_text", {"targets": ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "o_proj")}),
    "mamba": ("nemotron_h", {"targets": ("in_proj", "out_proj", "q_proj")}),
    "latent experts": (
        "nemotron_h",
        {
            "targets": ("fc1_latent_proj", "fc2_latent_proj", "shared_experts.up_proj"),
            "config": {"moe_latent_size": 36},
        },
    ),
    "shared expert": ("qwen2_moe", {"targets": ("q_proj", "shared_expert.gate_proj", "shared_expert.down_proj")}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_merged_weights(case: str, tmp_path: Path) -> None:
    check_logits(case, tmp_path)


def check_logits(case: str, folder: Path, kernels: str = "auto") -> None:
    """Compare the logits of a case with those of merged weights."""
    family, options = CASES[case]
    config = options.get("config", {})
    options = {name: value for name, value in options.items() if name != "config"}
    model = make_checkpoint(family, folder / "model", **config)
    adapter = make_adapter(model, folder / "adapter", **options)
    prompt = torch.randint(0, 256, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    tokens, logits = generate(model, prompt, num_tokens=5, chunk=11, kernels=kernels, adapter=adapter)
    oracle = load_oracle(model)
    with torch.no_grad():
        base = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = merge(oracle, adapter)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert (base - expected).abs().mean() > 0.05
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "arch", "targets"),
    [
        ("llama", "llama", (*LINEARS, "embed_tokens", "lm_head")),
        ("qwen2", "qwen2", LINEARS),
        ("phi3", "phi3", ("qkv_proj", "gate_up_proj")),
        ("qwen3_moe", "qwen3moe", ("q_proj", *(f"experts.{n}.{part}" for n in range(9) for part in LINEARS[4:]))),
    ],
)
def test_gguf_adapters_are_those_that_were_converted(
    family: str, arch: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    model = make_checkpoint(family, tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "adapter", targets=targets)
    converted = write_gguf_adapter(adapter, tmp_path / "adapter.gguf", arch, model=model)
    tokens, logits = generate(model, [3, 5, 7, 9], num_tokens=3, chunk=2, adapter=adapter)
    again, of_gguf = generate(model, [3, 5, 7, 9], num_tokens=3, chunk=2, adapter=converted)
    assert again == tokens
    assert torch.equal(of_gguf, logits)


def test_modules_that_may_not_change_need_no_memory(tmp_path: Path) -> None:
    """Some of a stacked product, and one product of the experts, but not the other."""
    model = make_checkpoint("qwen3_moe", tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "adapter", targets=("q_proj", "v_proj", "experts.3.down_proj"))
    given: dict[str, Any] = {"prompt": [3, 5, 7, 9], "num_tokens": 3, "chunk": 2, "adapter": adapter}
    tokens, logits = generate(model, **given)
    targets = ["q_proj", "self_attn.v_proj", "experts.down_proj"]
    again, restricted = generate(model, **given, lora_target_modules=targets)
    assert again == tokens
    assert torch.equal(restricted, logits)
    with pytest.raises(ValueError, match=r"changes layers\.0\.attention\.v, for which .* start with down_proj, v_proj"):
        generate(model, **given, lora_target_modules=["q_proj"])


def test_loads_run_beside_steps_one_after_another() -> None:
    loader, done, go = AdapterLoader([Mock()], Mock(), Mock()), list[int](), threading.Event()

    def load(command: LoadAdapter) -> None:
        assert go.wait(60)
        done.append(command.slot)
        if command.adapter.digest == "bad":
            raise ValueError("no adapter")

    with patch.object(loader, "load", load):
        for slot, digest in enumerate(("good", "bad", "good")):
            loader.begin(LoadAdapter(slot, AdapterRef(digest, "")))
        assert [loader.look(LookAtAdapter(slot)) for slot in range(3)] == [False] * 3
        go.set()
        while not loader.look(LookAtAdapter(2)):
            pass
    assert done == [0, 1, 2]
    assert loader.look(LookAtAdapter(0))
    for _ in range(2):
        with pytest.raises(ValueError, match="no adapter"):
            loader.look(LookAtAdapter(1))
