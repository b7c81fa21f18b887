"""Every way of storing weights: any part of any weight is what the format's library decodes, and answers follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from shardline.checkpoints.lookup import decoder_spec
from shardline.checkpoints.quantization import methods
from shardline.config.engine import STORED_METHODS, EngineConfig
from shardline.deployment.here import resolve_here
from shardline.messages.request import Request
from shardline.models.parameters import parameters
from shardline.models.sharding import shard
from shardline.runtime.loader import slices
from shardline.runtime.loader.weights import WeightSource, open_weights
from shardline.runtime.machines import open_backend
from shardline.runtime.parallel.groups import make_single_rank_groups
from shardline.runtime.worker import Worker
from shardline.sampling_params import SamplingParams
from shardline.weights.base import FormatChoice
from tests.exactness.harness import start_engine
from tests.models.checkpoints import make_checkpoint

from .stored_checkpoints import write_checkpoint, write_mxfp4_experts
from .stored_formats import FORMATS

pytest.importorskip("compressed_tensors")


OTHER_FAMILIES = [("phi3", "fp8 blocks"), ("mixtral", "nf4"), ("deepseek_v3", "fp8 blocks")]
"""Fused tensors, experts, and latents with an absorbed projection."""


def weights_of(folder: Path, dtype: str = "float32") -> WeightSource:
    return open_weights(resolve_here(EngineConfig.from_options(model=str(folder), dtype=dtype, device="cpu")))


def write(tmp_path: Path, name: str, family: str = "llama") -> None:
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2 if family == "llama" else 1,
        **({"intermediate_size": 96} if family == "llama" else {}),
    }
    model = make_checkpoint(family, tmp_path / "model", **sizes)
    write_checkpoint(model, tmp_path / "packed", tmp_path / "plain", FORMATS[name])


@pytest.mark.parametrize(("family", "name"), [*(("llama", name) for name in FORMATS), *OTHER_FAMILIES])
def test_every_part_is_what_the_library_decodes(family, name, tmp_path, monkeypatch):
    monkeypatch.setattr(slices, "_SLICE_ELEMENTS", 1 << 12)
    write(tmp_path, name, family)
    _assert_equal_parts(tmp_path)


def _assert_equal_parts(tmp_path: Path) -> None:
    """All parts that a rank may hold are equal in the packed and the plain checkpoint."""
    spec = decoder_spec(json.loads((tmp_path / "packed" / "config.json").read_text()))
    packed, plain = weights_of(tmp_path / "packed"), weights_of(tmp_path / "plain")
    num_packed = 0
    for parameter, _ in parameters(spec):
        for size in (1, 2, 3):
            for rank in range(size):
                for numerics in ("exact", "fast"):
                    spans = shard(parameter, spec, rank, size, numerics)
                    expected = plain.get(parameter, spans)
                    assert torch.equal(packed.get(parameter, spans), expected), parameter
                    grouped = packed.get_packed(parameter, spans)
                    if grouped is not None:
                        num_packed += 1
                        assert torch.equal(grouped.dequantize(expected.dtype), expected), parameter
    assert num_packed


_SAME_FORM = (
    *("float a tensor", "fp8 a tensor, inverse", "fp8 an output", "naive", "nf4 nested", "mxfp4", "modelopt fp8"),
    "int8 with int8 inputs",  # tests/weights/test_packed.py compares their products
)
"""Formats whose weights have the form of another format's once they are in memory."""


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in _SAME_FORM])
def test_log_probabilities_are_those_of_transformers(name, tmp_path):
    write(tmp_path, name)
    _assert_log_probabilities(tmp_path, tensor=2 if name in ("fp8 blocks", "nf4") else 1)


def _assert_log_probabilities(tmp_path: Path, tensor: int) -> None:
    """The engine computes with the packed checkpoint what transformers computes with the plain one."""
    token_ids = torch.randint(0, 256, (12,), generator=torch.Generator().manual_seed(1))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="eager")
    with torch.no_grad():
        expected = model(token_ids[None]).logits[0].log_softmax(1)
    engine, executor = start_engine(tmp_path / "packed", tensor=tensor, dtype="float32")
    params = SamplingParams(max_tokens=1, prompt_logprobs=20)
    engine.add_request(Request(request_id="a", prompt_token_ids=token_ids.tolist(), sampling=params))
    found = [scores for output in engine.step() for scores in output.prompt_logprobs or []]
    executor.close()
    assert len(found) == len(token_ids) - 1
    for row, scores in zip(expected, found, strict=False):
        torch.testing.assert_close(torch.tensor(scores.top_logprobs), row[scores.top_ids], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("nf4", {"load_in_4bit": True, "load_in_8bit": False, "llm_int8_skip_modules": None}),
        ("bitsandbytes int8", {"load_in_8bit": True}),
        ("bitsandbytes int8", {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}),
        ("int4", {"quant_method": "compressed_tensors"}),
        ("int4", {"quant_method": None, "ignore": None}),
        ("modelopt fp8", {"quant_method": None, "config_groups": {"group_0": {}}, "kv_cache_scheme": "FP8"}),
        ("fp8 blocks", {"modules_to_not_convert": None, "ignored_layers": None, "activation_scheme": "dynamic"}),
    ],
)
def test_sections_as_old_versions_wrote_them(name, section, tmp_path):
    write(tmp_path, name)
    if name in ("int4", "fp8 blocks", "modelopt fp8"):
        section = {**FORMATS[name].section, **section}
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    (tmp_path / "packed" / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    _assert_equal_parts(tmp_path)


@pytest.mark.parametrize("name", ["fp8 blocks, exponents", "several groups", "nf4", "int8 with int8 inputs"])
def test_ranks_hold_as_many_bytes_as_planned(name, tmp_path):
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 64}
    model = make_checkpoint("llama", tmp_path / "model", **sizes)
    write_checkpoint(model, tmp_path / "packed", tmp_path / "plain", FORMATS[name])
    setup = resolve_here(EngineConfig.from_options(model=str(tmp_path / "packed"), device="cpu", cpu_threads=1))
    report = Worker(setup, open_backend("cpu", 0, threads=1), make_single_rank_groups()).load()
    assert report.weight_bytes == pytest.approx(setup.weights[0].num_bytes, rel=0.02)


@pytest.mark.parametrize("family", ["qwen3_vl_moe_text", "gpt_oss"])
def test_stacked_experts_of_mxfp4(family, tmp_path):
    """In gpt_oss, rows of gate and up alternate."""
    if family == "gpt_oss":
        make_checkpoint(family, tmp_path / "model", num_hidden_layers=2, intermediate_size=32)
    else:
        options: dict[str, Any] = {"num_hidden_layers": 1, "moe_intermediate_size": 32, "mlp_only_layers": []}
        make_checkpoint("qwen3_moe", tmp_path / "model", **options)
    write_mxfp4_experts(family, tmp_path / "model", tmp_path / "packed", tmp_path / "plain")
    _assert_equal_parts(tmp_path)
    if family == "gpt_oss":
        _assert_log_probabilities(tmp_path, tensor=2)


def test_experts_that_a_quantizer_took_apart(tmp_path):
    """llm-compressor stores each linear of the experts of Llama 4 by itself; the model's own checkpoint stacks them."""
    model, apart = make_checkpoint("llama4_text", tmp_path / "model", num_hidden_layers=2), tmp_path / "apart"
    tensors = {}
    for key, tensor in load_file(model / "model.safetensors").items():
        if ".experts." not in key:
            tensors[key] = tensor
            continue
        base, part = key.rsplit(".", 1)
        for expert, weight in enumerate(tensor.transpose(1, 2)):
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for name, rows in zip(names, weight.chunk(len(names)), strict=True):
                tensors[f"{base}.{expert}.{name}.weight"] = rows.contiguous()
    apart.mkdir()
    (apart / "config.json").write_text((model / "config.json").read_text())
    save_file(tensors, apart / "model.safetensors", {"format": "pt"})
    write_checkpoint(apart, tmp_path / "packed", tmp_path / "plain", FORMATS["fp8 an output"])
    _assert_equal_parts(tmp_path)
    stacked, ours = weights_of(model), weights_of(apart)
    for name, shape in parameters(decoder_spec(json.loads((model / "config.json").read_text()))):
        assert torch.equal(stacked.get(name, (None,) * len(shape)), ours.get(name, (None,) * len(shape))), name


def test_what_a_checkpoint_is_may_be_stated(tmp_path):
    write(tmp_path, "int4")
    folder = str(tmp_path / "packed")

    def resolve(**options: Any) -> Any:
        return resolve_here(EngineConfig.from_options(model=folder, device="cpu", **options))

    assert resolve(quantization="compressed-tensors").weight_format == resolve().weight_format
    assert resolve(quantization="int8").weight_format.name == "int8"
    for method in ("awq", "fp8", "mxfp4"):
        with pytest.raises(ValueError, match=rf"quantization {method}: .* quantized as compressed-tensors; leave"):
            resolve(quantization=method)
    with pytest.raises(ValueError, match=r"load_format bitsandbytes: .* quantized as compressed-tensors; leave"):
        resolve(load_format="bitsandbytes")
    folder = str(tmp_path / "plain")
    with pytest.raises(ValueError, match="quantization gptq: this checkpoint is not quantized; leave"):
        resolve(quantization="gptq")
    assert {name.replace("-", "_") for name in STORED_METHODS} <= methods().keys()


def test_the_inputs_of_fp8_weights_may_be_rounded(tmp_path):
    write(tmp_path, "fbgemm")
    folder, file = tmp_path / "packed", tmp_path / "packed" / "model.safetensors"

    def resolve(model: Path = folder, **options: Any) -> Any:
        return resolve_here(EngineConfig.from_options(model=str(model), device="cpu", **options))

    q, no_spans = "layers.0.attention.q.weight", (None, None)
    option = "--quantization fp8_w8a8 rounds activations too"
    assert resolve().reasons[0] == f"weights fbgemm_fp8 e4m3, a scale for each output, W8A16 (CPU; {option})"
    assert "W8A32 (CPU; " in resolve(dtype="float32").reasons[0]
    setup = resolve(quantization="fp8_w8a8")
    assert setup.weight_format == replace(resolve().weight_format, name="fp8_w8a8")
    weight = open_weights(setup).get_packed(q, no_spans)
    assert weight is not None
    assert (weight.input_scale, weight.input_bound) == (0.0, 1200.0)
    save_file({**load_file(file), f"{Q}.input_scale": torch.tensor([0.25])}, file, {"format": "pt"})
    weight = open_weights(setup).get_packed(q, no_spans)
    assert weight is not None
    assert weight.input_scale == 0.25
    _change(folder, f"{Q}.input_scale", torch.tensor([0.0]))
    with pytest.raises(ValueError, match=r"q_proj.input_scale is 0.0, and must be positive"):
        open_weights(setup).get_packed(q, no_spans)
    assert resolve(tmp_path / "plain", quantization="fp8_w8a8").weight_format == FormatChoice("fp8_w8a8")
    write_checkpoint(tmp_path / "plain", tmp_path / "int4", tmp_path / "other", FORMATS["int4"])
    with pytest.raises(ValueError, match=r"fp8_w8a8 is for e4m3 weights, but .* as compressed-tensors, pack-q"):
        resolve(tmp_path / "int4", quantization="fp8_w8a8")


def test_scales_of_the_kv_cache_are_named_and_not_used(tmp_path):
    write(tmp_path, "float an output")
    folder = tmp_path / "packed"
    before = resolve_here(EngineConfig.from_options(model=str(folder), device="cpu"))
    _change(folder, "model.layers.0.self_attn.k_scale", torch.ones(1))
    _change_section(folder, kv_cache_scheme={"num_bits": 8, "type": "float"})
    setup = resolve_here(EngineConfig.from_options(model=str(folder), device="cpu"))
    assert "kv_cache_scheme, k_scale of the checkpoint not used (kv_cache_dtype decides)" in setup.reasons
    assert setup.cache == before.cache


def _change(folder: Path, key: str, tensor: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    tensors = {name: value for name, value in load_file(file).items() if name != key}
    save_file({**tensors, **({} if tensor is None else {key: tensor})}, file, {"format": "pt"})


def _change_section(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(values)
    (folder / "config.json").write_text(json.dumps(config))


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "key", "tensor", "says"),
    [
        ("int4", f"{Q}.weight_scale", None, r"q_proj\.weight_scale is missing"),
        (
            "int4",
            f"{Q}.weight_scale",
            torch.ones(64, 9),
            r"weight_scale has shape \[64, 9\], not \[64, 8\] \(model\.saf",
        ),
        ("fp8 blocks", f"{Q}.weight_scale_inv", torch.ones(2, 2), r"has shape \[2, 2\], not \[3, 2\]"),
        ("nf4", f"{Q}.weight.absmax", torch.ones(3), r"absmax has shape \[3\], which fits no block size"),
        ("nf4", f"{Q}.weight.quant_state.bitsandbytes__nf4", None, "bitsandbytes__nf4 is missing"),
        ("fbgemm", f"{Q}.weight", torch.zeros(64, 64, dtype=torch.float8_e5m2), "has type F8_E5M2; supported"),
    ],
)
def test_headers_that_do_not_fit_are_named(name, key, tensor, says, tmp_path):
    write(tmp_path, name)
    _change(tmp_path / "packed", key, tensor)
    with pytest.raises(ValueError, match=says):
        resolve_here(EngineConfig.from_options(model=str(tmp_path / "packed"), device="cpu"))


@pytest.mark.parametrize(
    ("name", "section", "says"),
    [
        ("int4", {"ignore": [Q]}, "q_proj.weight is quantized, but quantization_config leaves this module out"),
        ("int4", {"ignore": ["re:("]}, "is no regular expression"),
        ("int4", {"ignore": [3]}, "must be a list of names"),
        ("int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparsity .* is not supported"),
        ("int4", {"transform_config": {"config_groups": {"u": {}}}}, "with transforms .* is not supported"),
        ("nf4", {"bnb_4bit_quant_storage": "bfloat16"}, "stored as bfloat16 are not supported"),
        ("fp8 blocks", {"weight_block_size": [128, 128]}, r"has shape \[3, 2\], not \[1, 1\]"),
    ],
)
def test_a_configuration_that_does_not_fit_is_named(name, section, says, tmp_path):
    write(tmp_path, name)
    _change_section(tmp_path / "packed", **section)
    with pytest.raises(ValueError, match=says):
        resolve_here(EngineConfig.from_options(model=str(tmp_path / "packed"), device="cpu"))


@pytest.mark.parametrize(
    ("name", "key", "tensor", "says"),
    [
        ("int4", f"{Q}.weight_scale", torch.full((64, 8), float("nan")), "weight_scale holds NaN or Inf"),
        ("int4 sorted", f"{Q}.weight_g_idx", torch.full((64,), 8).int(), "g_idx names groups outside of 0 to 7"),
        ("int4", f"{Q}.weight_shape", torch.tensor([64, 63]), r"states \[64, 63\], but the weight is \[64, 64\]"),
        ("nf4", f"{Q}.weight.quant_state.bitsandbytes__nf4", torch.zeros(9).byte(), "does not describe"),
    ],
)
def test_numbers_out_of_range_are_named_as_they_load(name, key, tensor, says, tmp_path):
    write(tmp_path, name)
    _change(tmp_path / "packed", key, tensor)
    with pytest.raises(ValueError, match=says):
        weights_of(tmp_path / "packed").get("layers.0.attention.q.weight", (None, None))
