"""Norms folded into what reads them: the same model to the bit, unquantized, and a better one quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from shardline.checkpoints.adapters import read_adapter
from shardline.checkpoints.description import read_model
from shardline.config.engine import EngineConfig, ModelConfig
from shardline.deployment.deployment import Deployment
from shardline.deployment.here import resolve_here
from shardline.messages.request import AdapterRef
from shardline.models.parameters import kind_of
from shardline.runtime.loader.folded_norms import FoldedNorms, fold_factors
from shardline.runtime.loader.weights import open_weights
from shardline.runtime.scoring import Document, Scorer, compare
from shardline.weights.formats import plain
from shardline.weights.formats.int8 import Format as Int8
from shardline.weights.formats.int8_w8a16 import Format as Int8W8A16
from tests.exactness.harness import Answer, make_requests, run, start_engine
from tests.models.adapters import make_adapter
from tests.models.checkpoints import make_checkpoint, whole_tensors

GQA = {"attention_norm", "attention.q", "attention.k", "attention.v"}
DENSE = {"feed_forward_norm", "feed_forward.gate", "feed_forward.up"}
EXPERTS = {"feed_forward.experts.gate", "feed_forward.experts.up"}
SHARED = {"feed_forward.shared.gate", "feed_forward.shared.up"}
ROUTED = {"feed_forward_norm", "feed_forward.router", *EXPERTS}
FOLDED = {
    "llama": GQA | DENSE,
    "gemma2": GQA | DENSE,  # norms with an offset
    "gpt2": GQA | {"feed_forward_norm", "feed_forward.up"},  # norms with a bias, blocks without a gate
    "cohere2": GQA | DENSE - {"feed_forward_norm"},  # one norm for both blocks
    "olmo2": set[str](),  # norms behind blocks only
    "deepseek_v2": {"attention_norm", "attention.q", "attention.kv_down"} | DENSE | ROUTED | SHARED,
    "deepseek_v3": {"attention_norm", "attention.q_down", "attention.kv_down", "attention.q_norm", "attention.q_up"}
    | DENSE
    | ROUTED
    | SHARED,
    "qwen2_moe": GQA | DENSE | ROUTED | SHARED | {"feed_forward.shared_gate"},
    "qwen3_5_moe_text": GQA
    | {"attention.z", "attention.beta", "attention.decay"}
    | {"feed_forward_norm", "feed_forward.router", "feed_forward.shared_gate"}
    | EXPERTS
    | SHARED,
    "nemotron_h": GQA
    | {"attention.z", "attention.step", "feed_forward_norm", "feed_forward.up", "feed_forward.router"}
    | {"feed_forward.experts.up", "feed_forward.shared.up"},
    "llama4_text": GQA | DENSE | ROUTED | SHARED,  # scales the inputs of experts
    "gemma4_text": GQA
    | DENSE - {"feed_forward.gate", "feed_forward.up"}
    | SHARED
    | EXPERTS
    | {"feed_forward.experts_norm"},
}
"""The kinds of parameters that change."""
TOKENS = torch.randint(0, 256, (48,), generator=torch.Generator().manual_seed(2)).tolist()


def outlying(family: str, folder: Path) -> Path:
    """A checkpoint with some large weights in every norm."""
    make_checkpoint(family, folder, dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if (
            tensor.dim() == 1
            and not name.endswith((".linear_attn.norm.weight", ".mixer.norm.weight"))
            and name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "layernorm_2.weight"))
        ):
            tensor[:10:3] = torch.tensor([21.0, -9.0, 2.75, 90.0], dtype=tensor.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def resolved(folder: Path, quantization: str = "none") -> Deployment:
    options = {"dtype": "bfloat16", "device": "cpu", "cpu_threads": 1}
    return resolve_here(EngineConfig.from_options(model=str(folder), quantization=quantization, **options))


@pytest.mark.parametrize("family", FOLDED)
def test_an_unquantized_model_has_the_same_bits(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = resolved(outlying(family, tmp_path))
    document, source = Document(TOKENS, 1), open_weights(deployment)
    expected = Scorer(deployment, len(TOKENS)).logprobs(document)
    folded = FoldedNorms(deployment.spec, source.get, source.is_packed)
    before, after = (whole_tensors(one, deployment.spec) for one in (source, folded))
    changed = {kind_of(name) for name in before if not torch.equal(before[name], after[name])}
    assert changed == FOLDED[family]
    monkeypatch.setattr(plain.Format, "folds_norms", True)
    assert torch.equal(Scorer(deployment, len(TOKENS)).logprobs(document), expected)


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "nemotron_h"])
def test_states_are_those_of_a_document(family: str, tmp_path: Path) -> None:
    """Of quantized weights, too, a model is about the same."""
    folder = make_checkpoint(family, tmp_path / "model", dtype="bfloat16")
    documents = [Document(TOKENS[:30], 1), Document(TOKENS, 1), Document(TOKENS[:30], 1)]
    exact = resolved(folder)
    assert compare(exact, exact, documents).max_difference == 0.0
    assert 0 < compare(resolved(folder, "int8"), exact, documents).kl_divergence < 0.05


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_formats_keep_more_of_a_model_with_large_activations(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama", tmp_path, dtype="bfloat16")
    tensors = load_file(tmp_path / "model.safetensors")
    for key, tensor in tensors.items():
        if "layernorm" in key:
            tensor[:40:9] *= 16
        elif key.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            tensor[:, :40:9] /= 16
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    quantized, exact = resolved(tmp_path, name), resolved(tmp_path)
    folded = compare(quantized, exact, [Document(TOKENS, 1)])
    for kind in (Int8, Int8W8A16):
        monkeypatch.setattr(kind, "folds_norms", False)
    assert folded.kl_divergence < 0.5 * compare(quantized, exact, [Document(TOKENS, 1)]).kl_divergence


@pytest.mark.parametrize(
    ("family", "name", "layouts"),
    [
        ("llama", "int4", [{"tensor": 2}, {"pipeline": 2, "max_num_batched_tokens": 13}]),
        ("qwen2_moe", "int8", [{"tensor": 3}, {"tensor": 2, "enable_expert_parallel": True}]),
    ],
)
def test_every_layout_gives_the_same_bits(
    family: str, name: str, layouts: list[dict[str, Any]], tmp_path: Path
) -> None:
    model, answers = outlying(family, tmp_path), []
    for layout in [{}, *layouts]:
        engine, executor = start_engine(model, quantization=name, **layout)
        answers.append(run(engine, make_requests(256, count=3), "together" if layout else "alone"))
        engine.close()
        executor.close()
    assert all(one == answers[0] for one in answers[1:])


def test_adapters_read_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = outlying("llama", tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "adapter", targets=["q_proj", "v_proj", "o_proj", "up_proj", "lm_head"])
    digest = read_adapter(adapter, read_model(ModelConfig(model=str(model))).spec(), 64).digest()

    def answers(ref: AdapterRef | None) -> dict[str, Answer]:
        engine, executor = start_engine(model, dtype="bfloat16", enable_lora=True, max_lora_rank=32)
        salt = "" if ref is None else ref.digest
        asked = [msgspec.structs.replace(one, adapter=ref, cache_salt=salt) for one in make_requests(256, count=2)]
        try:
            return run(engine, asked, "together")
        finally:
            engine.close()
            executor.close()

    base, expected = answers(None), answers(AdapterRef(digest, str(adapter)))
    assert base != expected
    monkeypatch.setattr(plain.Format, "folds_norms", True)
    assert answers(AdapterRef(digest, str(adapter))) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_factors_are_powers_of_two_that_lose_nothing(offset: float, dtype: torch.dtype) -> None:
    weight = (torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 0.2 + 1 - offset).to(dtype)
    weight[::7] = weight[::7].abs() * 50
    weight[[1, 2, 3]] = torch.tensor([-2.0 - offset, 2.0 - offset, 0.0], dtype=dtype)
    factors = fold_factors(weight, offset)
    assert factors is not None
    sizes = (weight.double() + offset).abs()
    left = (weight.double() + offset) / factors - offset
    assert torch.equal(left.to(dtype).double(), left)
    assert (torch.frexp(factors).mantissa == 0.5).all()
    assert (factors[sizes < 2 * sizes.median()] == 1).all()
    assert ((sizes / factors < 2 * sizes.median()) | (weight < 0)).all()  # of negative ones, the dtype may lack some


@pytest.mark.parametrize("weight", [[0.0, 0.0, 0.0, 5.0], [1.0, 1.1, 0.9, 1.2], [1.0, float("nan"), 1.0, float("inf")]])
def test_some_norms_stay_as_they_are(weight: list[float]) -> None:
    assert fold_factors(torch.tensor(weight), 0.0) is None
