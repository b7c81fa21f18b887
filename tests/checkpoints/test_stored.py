"""What checkpoints store: bytes per weight, which weights, and counting equal layers once."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.checkpoints.lookup import decoder_spec, family, known_families
from shardline.checkpoints.quantization import methods, read_stored, usual_rules
from shardline.config.topology import RankGrid
from shardline.models.hf_config import HFConfig
from shardline.models.parameters import embeds_tokens, is_kept_in_float32, is_linear, parameters, stage_parameters
from shardline.models.partition import ExpertShare
from shardline.models.sharding import Numerics, check_tensor_parallel, shard, shard_shape
from shardline.models.sizes import (
    checkpoint_bytes,
    largest_weight_bytes,
    num_parameters,
    stage_spans,
    stored_weight_bytes,
    weight_bytes,
)
from shardline.models.spec import DecoderSpec
from shardline.models.stored_weights import ModulePatterns, Packing, StoredRules
from shardline.planner.planned_model import planned_config, planned_families, read_planned
from shardline.weights.base import FormatChoice
from shardline.weights.formats import format_names
from tests.models.specs import decoder_specs

_LLAMA: dict[str, Any] = {"model_type": "llama", "torch_dtype": "bfloat16"}


def _role(name: str) -> Any:
    if name == "lm_head.weight":
        return "lm_head"
    if ".experts." in name:
        return "expert"
    if name.endswith((".attention.k.weight", ".attention.v.weight", ".attention.kv_down.weight")):
        return "key_value"
    if name.endswith(
        (".attention.q.weight", ".attention.q_down.weight", ".attention.q_up.weight", ".attention.o.weight")
    ):
        return "attention"
    return "down" if name.endswith((".feed_forward.down.weight", ".shared.down.weight")) else "layer"


@settings(max_examples=60, deadline=None)
@given(
    spec=decoder_specs(max_layers=5),
    tp_size=st.integers(1, 4),
    num_stages=st.integers(1, 3),
    numerics=st.sampled_from(["exact", "fast"]),
    expert_parallel=st.booleans(),
    format_name=st.sampled_from(format_names()),
)
def test_equal_layers_and_experts_counted_once_give_the_sum_over_all(
    spec: DecoderSpec, tp_size: int, num_stages: int, numerics: Numerics, expert_parallel: bool, format_name: str
) -> None:
    try:
        check_tensor_parallel(spec, tp_size)
        stages = stage_spans(spec, num_stages)
    except ValueError:
        return
    grid = RankGrid(tp_size, num_stages)
    assert num_parameters(spec) == sum(math.prod(shape) for _, shape in parameters(spec))
    held = FormatChoice(format_name).open_format()
    for place in map(grid.place, range(grid.world_size)):
        stage = stages[place.pp_rank]
        experts = ExpertShare(place.tp_rank, tp_size) if expert_parallel else None
        embeds, last = embeds_tokens(spec, stage), stage.stop == len(spec.layers)
        named = [
            ("lm_head.weight" if n == "embed.weight" and not embeds else n, s) for n, s in stage_parameters(spec, stage)
        ]
        largest = max(
            math.prod(shard_shape(shape, shard(name, spec, place.tp_rank, tp_size, numerics, experts)))
            for name, shape in named
        )
        apart = not held.is_dense("lm_head") and not held.packs_embedding
        if embeds and last and spec.tied_embeddings and apart:
            named.append(("lm_head.weight", (spec.vocab_size, spec.hidden_size)))
        total = 0
        for name, shape in named:
            local = shard_shape(shape, shard(name, spec, place.tp_rank, tp_size, numerics, experts))
            if is_linear(name):
                total += held.num_bytes(local[0], local[1], 2, _role(name))
            elif name == "embed.weight" and held.packs_embedding:
                total += held.num_bytes(local[0], local[1], 2, "lm_head")
            else:
                total += math.prod(local) * (4 if is_kept_in_float32(name) else 2)
        choice = FormatChoice(format_name)
        assert weight_bytes(spec, place, stages, "bfloat16", numerics, choice, expert_parallel) == total
        assert largest_weight_bytes(spec, place, stages, "bfloat16", numerics, expert_parallel) == 2 * largest


@pytest.mark.parametrize(
    ("section", "label", "size"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 256 * 512 + 4 * 2 * 4),
        ({"quant_method": "fp8"}, "fp8", 256 * 512 + 8),
        ({"quant_method": "fbgemm_fp8"}, "fp8", 256 * 512 + 256 * 4),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4", 256 * 256 + 256 * 4 * 2 + 512 + 512 * 4),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", 256 * 256 + 256 * 4 * 2 + 512),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 256 * 256 + 256 * 32 + 8),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 256 * 512 + 8),
    ],
)
def test_bytes_of_a_weight(section: dict[str, Any], label: str, size: int) -> None:
    rules = read_stored(HFConfig({**_LLAMA, "quantization_config": section}))
    assert rules.label == label
    assert rules.rules[0].packing.num_bytes(256, 512) == size
    assert rules.rules[0].packing.num_bytes(0, 512) == 0


def _compressed(**weights: Any) -> StoredRules:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, **weights}}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return read_stored(HFConfig({**_LLAMA, "quantization_config": section}))


def test_compressed_tensors() -> None:
    grouped = _compressed(type="int", group_size=32, strategy="group").rules[0].packing
    assert (grouped.label, grouped.num_bytes(256, 512)) == ("int4", 256 * 256 + 256 * 16 * 2)
    asymmetric = _compressed(type="int", group_size=32, strategy="group", symmetric=False).rules[0].packing
    assert asymmetric.num_bytes(256, 512) == grouped.num_bytes(256, 512) + 256 * 16 // 2
    channel = _compressed(type="float", num_bits=8, strategy="channel").rules[0].packing
    assert (channel.label, channel.num_bytes(256, 512)) == ("fp8", 256 * 512 + 256 * 4)
    assert _compressed(type="float", num_bits=8, strategy="tensor").rules[0].packing.num_bytes(2, 2) == 12
    with pytest.raises(ValueError, match="strategy 'odd' is not known"):
        _compressed(strategy="odd")


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'bitnet' is not known; known: .*gptq"):
        read_stored(HFConfig({**_LLAMA, "quantization_config": {"quant_method": "bitnet"}}))
    assert read_stored(HFConfig(_LLAMA)) == StoredRules()


def test_every_method_has_the_contract() -> None:
    for name, method in methods().items():
        assert callable(method.read), name
    assert set(usual_rules()) == {"fp8", "int4", "int8", "mxfp4", "nvfp4"}


@pytest.mark.parametrize(
    ("module", "pattern", "hit"),
    [
        ("model.layers.3.mlp.gate", "gate", True),
        ("model.layers.3.mlp.gate_proj", "gate", False),
        ("model.layers.3.self_attn.q_proj", "model.layers.*.self_attn", True),
        ("model.layers.3.self_attn.q_proj", "model.language_model.layers.3.self_attn*", True),
        ("model.layers.13.self_attn.q_proj", "model.layers.1.self_attn", False),
        ("model.layers.3.mlp.up_proj", r"re:.*mlp\.(gate|up)_proj.*", True),
        ("model.layers.3.mlp.experts.1.up_proj", r"re:.*mlp\.(gate|up)_proj.*", False),
    ],
)
def test_patterns_of_modules(module: str, pattern: str, hit: bool) -> None:
    assert ModulePatterns([pattern]).match(module) == hit


def test_a_list_that_was_cut_holds_for_all_layers_if_it_names_several() -> None:
    ignore = ["model.layers.0.self_attn*", "model.layers.1.self_attn*", "model.layers.0.mlp*", "... 9 entries in all"]
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore}
    model = read_planned("m", {**_LLAMA, "quantization_config": section})
    stored = model.stored()
    assert stored.packing("layers.7.attention.q.weight") is None
    assert stored.packing("layers.0.feed_forward.up.weight") is None
    assert stored.packing("layers.7.feed_forward.up.weight") is not None
    assert stored.packing("lm_head.weight") is None
    expected = sum(stored.num_bytes(name, shape) for name, shape in parameters(model.spec))
    assert checkpoint_bytes(model.spec, stored) == expected
    assert stored.layer_class(0) != stored.layer_class(5)


def test_ranks_share_a_stored_checkpoint() -> None:
    model = read_planned("m", {**_LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4}})
    grid, stages = RankGrid(4, 2), stage_spans(model.spec, 2)
    parts = [stored_weight_bytes(model.spec, grid.place(rank), stages, model.stored()) for rank in range(8)]
    assert sum(parts) == pytest.approx(checkpoint_bytes(model.spec, model.stored()), rel=0.001)
    whole = [
        stored_weight_bytes(model.spec, grid.place(rank), stages, model.stored(), whole=("attention.q",))
        for rank in range(8)
    ]
    packing = model.stored().packing("layers.0.attention.q.weight")
    assert isinstance(packing, Packing)
    assert whole[0] - parts[0] == stages[0].size * (packing.num_bytes(4096, 4096) - packing.num_bytes(1024, 4096))


def test_a_wrapper_is_read_by_its_text_model() -> None:
    inner = {"model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 2}
    outer = {"model_type": "mistral3", "text_config": inner, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    model = read_planned("m", outer)
    assert model.spec.model_type == "mistral"
    assert model.spec.tied_embeddings
    assert not model.engine_refusal
    assert planned_config({"model_type": "x"})["dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="no spec for model_type 'x'"):
        read_planned("m", {"model_type": "x"})


def test_a_null_in_a_wrapped_configuration_stays_one() -> None:
    inner = {"model_type": "mistral", "sliding_window": None, "quantization_config": None}
    outer = {"model_type": "mistral3", "text_config": inner, "quantization_config": {"quant_method": "fp8"}}
    model = read_planned("m", outer)
    assert model.spec.layers[0].attention.window is None
    assert model.rules.label == "fp8"


def test_a_family_is_loaded_or_only_planned() -> None:
    """A model type that loads is not one that only the planner knows. The others are refused."""
    assert not set(known_families()) & set(planned_families())
    for model_type in planned_families():
        with pytest.raises(ValueError, match=f"'{model_type}' is not supported: "):
            family(model_type)


@pytest.mark.parametrize(
    ("model_type", "says"),
    [
        *((name, "its recurrent layers are of a kind") for name in ("qwen3_next", "kimi_linear", "falcon_h1")),
        ("minimax_m3", "an indexer chooses the tokens"),
    ],
)
def test_a_refusal_names_what_is_missing(model_type: str, says: str) -> None:
    """Before anything else, such as a way of quantizing that is not supported."""
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    with pytest.raises(ValueError, match=f"'{model_type}' is not supported: {says}.*the engine does not have"):
        decoder_spec({"model_type": model_type, "quantization_config": section})


def test_the_names_of_e4m3() -> None:
    """MiniMax's files have a longer one."""
    for kind, count in (("e4m3", 2), ("float8_e4m3fn", 2), ("e5m2", 0)):
        section = {"quant_method": "fp8", "fmt": kind, "weight_block_size": [128, 128]}
        assert len(read_stored(HFConfig({**_LLAMA, "quantization_config": section})).layouts) == count


def test_what_torch_computes_on_gpus_is_named() -> None:
    sinks = read_planned("m", {"model_type": "gpt_oss"})
    assert not sinks.engine_refusal
    assert sinks.by_torch["attention"] == "Triton's has no attention sinks"
    assert not read_planned("m", {"model_type": "glm4_moe", "head_dim": 128}).engine_refusal
