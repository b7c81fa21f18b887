"""Weights that GPTQ and AWQ checkpoints have packed, against the same made dense by a packer of the tests' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardline.checkpoints.lookup import decoder_spec
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import KVAllocation
from shardline.deployment.here import resolve_here
from shardline.engine.report import startup_report
from shardline.messages.worker import RankReport
from shardline.models.parameters import parameters
from shardline.models.partition import Span
from shardline.models.sharding import shard
from shardline.runtime.loader.weights import WeightSource, open_weights
from tests.exactness.harness import make_requests, run, start_engine
from tests.models.checkpoints import make_checkpoint

from .packer import pack_checkpoint

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
CONFIGS = {
    "gptq": GPTQ,
    "gptq symmetric": {**GPTQ, "sym": True},
    "gptq_v2": {**GPTQ, "checkpoint_format": "gptq_v2", "group_size": 64},
    "gptq whole rows": {**GPTQ, "group_size": -1},
    "gptq 8 bits": {**GPTQ, "bits": 8},
    "gptq act-order": {**GPTQ, "desc_act": True},
    "gptq 8 bits act-order": {**GPTQ, "bits": 8, "desc_act": True, "sym": True},
    "awq": AWQ,
    "awq whole rows": {**AWQ, "group_size": -1},
}


def weights_of(folder: Path, dtype: str = "float32") -> WeightSource:
    return open_weights(resolve_here(EngineConfig.from_options(model=str(folder), dtype=dtype, device="cpu")))


# Layouts and key names have nothing to do with one another.
FAMILIES = [("llama", name) for name in CONFIGS]
FAMILIES += [(family, name) for family in ("qwen2", "mixtral", "phi3") for name in ("gptq", "awq")]


@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_every_part_of_every_weight_is_the_dense_one(tmp_path, family, name):
    model = make_checkpoint(family, tmp_path / "model", num_hidden_layers=1)
    pack_checkpoint(model, tmp_path / "packed", tmp_path / "plain", CONFIGS[name])
    spec = decoder_spec(json.loads((tmp_path / "packed" / "config.json").read_text()))
    keys = load_file(tmp_path / "packed" / "model.safetensors").keys()
    assert any("expert" in key and key.endswith("qweight") for key in keys) == (family == "mixtral")
    for dtype in ("float32", "bfloat16"):
        packed, plain = weights_of(tmp_path / "packed", dtype), weights_of(tmp_path / "plain", dtype)
        for parameter, _ in parameters(spec):
            for size in (1, 2, 3):
                for rank in range(size):
                    for numerics in ("exact", "fast"):
                        spans = shard(parameter, spec, rank, size, numerics)
                        assert torch.equal(packed.get(parameter, spans), plain.get(parameter, spans)), parameter


O_PROJ = "model.layers.0.self_attn.o_proj"
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
V2 = {**GPTQ, "checkpoint_format": "gptq_v2"}
_OLD_GPTQ = {"bits": 4, "group_size": 32, "desc_act": False, "damp_percent": 0.01, "true_sequential": True}
SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "auto-round, gptq": (GPTQ, {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq", "act_bits": 16}),
    "auto-round, nothing said": (GPTQ, AUTO_ROUND),
    "auto-round, awq": (AWQ, {**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}),
    "auto-round, its own": (V2, {**AUTO_ROUND, "packing_format": "auto_round"}),
    "auto-round, gptqmodel": (V2, {**AUTO_ROUND, "packing_format": "auto_round:gptqmodel"}),
    "auto-round 0.4": (
        GPTQ,
        {**AUTO_ROUND, "quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"},
    ),
    "auto-round 0.3": (V2, {**AUTO_ROUND, "quant_method": "intel/auto-round", "backend": "auto_round:exllamav2"}),
    "auto-round, underscore": (GPTQ, {**AUTO_ROUND, "quant_method": "auto_round", "extra_config": None}),
    "gptq without a method": (GPTQ, _OLD_GPTQ),
    "gptq in capitals": (GPTQ, {**GPTQ, "quant_method": "GPTQ", "dynamic": None, "modules_to_not_convert": None}),
    "awq without a method": (AWQ, {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    "awq, nulls": (AWQ, {**AWQ, "modules_to_not_convert": None, "version": None}),
    "awq, zero points all the same": (AWQ, {**AWQ, "zero_point": False, "provider": "auto-round"}),
    "awq by gptqmodel": (AWQ, {**AWQ, "version": None, "checkpoint_format": "gemm", "format": "gemm"}),
}
"""Configurations for what a packer of another name wrote."""


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_writers_say_the_same_in_other_words(tmp_path, name):
    packer, section = SPELLINGS[name]
    packed_llama(tmp_path, packer)
    _write_section(tmp_path / "packed", section)
    _assert_same_weights(tmp_path)


EXCLUSIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "auto-round": (GPTQ, {**AUTO_ROUND, "extra_config": {O_PROJ: {"bits": 16, "data_type": "float"}}}),
    "auto-round, a pattern": (GPTQ, {**AUTO_ROUND, "extra_config": {r".*o_proj.*": {"bits": 16}}}),
    "auto-round, awq": (
        AWQ,
        {**AUTO_ROUND, "packing_format": "auto_round:auto_awq", "extra_config": {O_PROJ: {"bits": 16}}},
    ),
    "awq": (AWQ, {**AWQ, "modules_to_not_convert": ["self_attn.o_proj"]}),
    "gptq": (GPTQ, {**GPTQ, "dynamic": {r"-:.*o_proj.*": {}}}),
    "gptq, null": (GPTQ, {**GPTQ, "dynamic": {r"-:.*o_proj.*": None}}),
    "nothing said": (AWQ, AWQ),
}


@pytest.mark.parametrize("name", EXCLUSIONS)
def test_a_module_may_stay_as_it_was(tmp_path, name):
    packer, section = EXCLUSIONS[name]
    folder = packed_llama(tmp_path, packer)
    dense = load_file(tmp_path / "model" / "model.safetensors")[f"{O_PROJ}.weight"]
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        change(folder, f"{O_PROJ}.{part}", None)
    for one in (folder, tmp_path / "plain"):
        change(one, f"{O_PROJ}.weight", dense)
    _write_section(folder, section)
    _assert_same_weights(tmp_path)


def test_a_module_may_have_its_own_bits(tmp_path):
    folder = packed_llama(tmp_path)
    pack_checkpoint(tmp_path / "model", tmp_path / "packed8", tmp_path / "plain8", {**GPTQ, "bits": 8})
    for source, target in (("packed8", folder), ("plain8", tmp_path / "plain")):
        tensors = load_file(tmp_path / source / "model.safetensors")
        for key in (key for key in tensors if key.startswith(O_PROJ)):
            change(target, key, tensors[key])
    for named in (O_PROJ, r".*self_attn\.o.*"):
        _write_section(folder, {**AUTO_ROUND, "extra_config": {named: {"bits": 8}}})
        _assert_same_weights(tmp_path)


def _write_section(folder: Path, section: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": section}))


def _assert_same_weights(tmp_path: Path) -> None:
    packed, plain = weights_of(tmp_path / "packed"), weights_of(tmp_path / "plain")
    for name, shape in parameters(decoder_spec(json.loads((tmp_path / "packed" / "config.json").read_text()))):
        spans = (None,) * len(shape)
        assert torch.equal(packed.get(name, spans), plain.get(name, spans)), name


@pytest.mark.parametrize("config", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_answers_are_those_of_the_dense_checkpoint_in_every_layout(tmp_path, config):
    model = make_checkpoint("llama", tmp_path / "model", num_hidden_layers=2)
    pack_checkpoint(model, tmp_path / "packed", tmp_path / "plain", config)
    requests = make_requests(256, count=4)
    answers = []
    dense = (("plain", 1, "none"), ("packed", 1, "none"), ("packed", 3, "none"))
    for folder, tensor, scheme in (*dense, ("packed", 1, None), ("packed", 3, None)):
        engine, executor = start_engine(tmp_path / folder, tensor=tensor, dtype="bfloat16", quantization=scheme)
        try:
            answers.append(run(engine, requests, "together"))
        finally:
            executor.close()
    assert answers[0] == answers[1] == answers[2]
    assert answers[3] == answers[4]


def packed_llama(tmp_path: Path, config: dict[str, Any] = GPTQ) -> Path:
    model = make_checkpoint("llama", tmp_path / "model", num_hidden_layers=1)
    pack_checkpoint(model, tmp_path / "packed", tmp_path / "plain", config)
    return tmp_path / "packed"


def change(folder: Path, key: str, tensor: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(key, None)
    if tensor is not None:
        tensors[key] = tensor
    save_file(tensors, file, {"format": "pt"})


KEY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("part", "tensor", "says"),
    [
        ("qzeros", None, "q_proj.qzeros is missing"),
        ("scales", torch.ones(2, 65), r"q_proj.scales has shape \[2, 65\], not \[2, 64\]"),
        ("qweight", torch.zeros(8, 64, dtype=torch.int64), "q_proj.qweight has type I64; supported: I32"),
        ("qweight", None, "q_proj.weight is missing"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_loaded(tmp_path, part, tensor, says):
    folder = packed_llama(tmp_path)
    change(folder, f"{KEY}.{part}", tensor)
    with pytest.raises(ValueError, match=says):
        resolve_here(EngineConfig.from_options(model=str(folder), device="cpu"))


def test_groups_out_of_order_are_refused(tmp_path):
    folder = packed_llama(tmp_path)
    change(folder, f"{KEY}.g_idx", (torch.arange(64) // 32).flip(0).int())
    with pytest.raises(
        ValueError, match=r"q_proj.g_idx puts columns into groups out of order, .*\(desc_act, actorder\)"
    ):
        weights_of(folder).get("layers.0.attention.q.weight", (None, None))


def test_a_bias_of_zeros_is_passed_over(tmp_path):
    folder = packed_llama(tmp_path)
    change(folder, f"{KEY}.bias", torch.zeros(64))
    weights_of(folder).get("layers.0.attention.q.weight", (None, None))
    change(folder, f"{KEY}.bias", torch.ones(64))
    with pytest.raises(ValueError, match=r"q_proj.bias is not zero, but the configuration has no bias"):
        weights_of(folder).get("layers.0.attention.q.weight", (None, None))


def test_the_log_says_what_became_of_them(tmp_path):
    resolved = resolve_here(EngineConfig.from_options(model=str(packed_llama(tmp_path, AWQ)), device="cpu"))
    assert resolved.dtype == "bfloat16"
    report = RankReport(0, "host", 1, "CPU", "portable", 1, 0, 0, 0.0)
    lines = startup_report(resolved, 0, KVAllocation(2), [report], {})
    assert "packed (the checkpoint's is awq, 4 bits in groups of 32, kept)" in lines[0]


def test_no_rows_are_no_rows(tmp_path):
    nothing = weights_of(packed_llama(tmp_path)).get("layers.0.attention.q.weight", (Span(0, 0), None))
    assert nothing.shape == (0, 64)
