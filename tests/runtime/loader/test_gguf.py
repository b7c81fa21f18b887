"""GGUF files against the `gguf` package, and against the checkpoints from which they were made."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from msgspec.structs import replace

from shardline.checkpoints.checkpoint import Checkpoint
from shardline.checkpoints.gguf.architectures import ARCHITECTURES as known_architectures
from shardline.checkpoints.gguf.checkpoint import GGUFCheckpoint
from shardline.checkpoints.gguf.config import read_config
from shardline.checkpoints.gguf.header import BLOCK_TYPES, PACKED_TYPES
from shardline.checkpoints.hub import resolve_model
from shardline.checkpoints.lookup import decoder_spec, known_families, without_norm_offsets
from shardline.cli.main import main
from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.kernels.host.grouped import GroupedGatedLinear, GroupedLinear
from shardline.messages.request import Request
from shardline.models.parameters import parameters
from shardline.models.partition import Span
from shardline.models.sharding import shard
from shardline.models.spec import DecoderSpec
from shardline.planner.catalog import find_model
from shardline.runtime.loader import slices
from shardline.runtime.loader.gguf import GGUFWeights
from shardline.runtime.loader.gguf_blocks import decode_blocks
from shardline.runtime.loader.weights import CheckpointWeights
from shardline.runtime.machines import open_backend
from shardline.runtime.parallel.groups import make_single_rank_groups
from shardline.runtime.worker import Worker
from shardline.sampling_params import SamplingParams
from shardline.weights.formats.packed import Format
from shardline.weights.grouped import GroupedWeight, StoredRows
from tests.exactness.harness import start_engine
from tests.models.checkpoints import make_checkpoint
from tests.runtime.ops.helpers import KERNELS
from tests.weights.forms import assert_same_panels

from .gguf_writer import ARCHITECTURES, mixed, random_blocks, save_plain, write_gguf
from .stored_checkpoints import as_language_model_of_qwen3_vl

_PACKED = [Type[name] for name in PACKED_TYPES]
_OPTIONS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"decoder_sparse_step": 1, "norm_topk_prob": False},
    "qwen3_moe": {"mlp_only_layers": []},
    "qwen3_vl_moe_text": {"num_hidden_layers": 1, "mlp_only_layers": []},
    "mistral": {"sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 20},
    "gemma3_text": {"query_pre_attn_scalar": 20},
    "glm4_moe": {"n_group": 1, "topk_group": 1},
    "llama4_text": {"attention_chunk_size": 8192, "floor_scale": 8192},
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("kind", _PACKED)
def test_blocks_decode_to_the_numbers_of_the_library(kind: Type) -> None:
    rng = np.random.default_rng(kind)
    number = next(number for number, known in BLOCK_TYPES.items() if known.name == kind.name)
    assert (number, *BLOCK_TYPES[number][1:]) == (kind, *gguf.GGML_QUANT_SIZES[kind])
    stored = random_blocks(kind, (37, 1024), rng)
    if kind == Type.MXFP4:
        stored[0, ::17] = np.arange(32) % 4  # the smallest scales are no normal numbers
    expected = gguf.dequantize(stored, kind)
    weight = decode_blocks(torch.from_numpy(stored), BLOCK_TYPES[number])
    assert torch.equal(weight.dequantize(torch.float32), torch.from_numpy(expected))
    assert int(weight.values.max()) < 1 << weight.bits
    assert weight.label == kind.name


@pytest.mark.parametrize("kind", _PACKED)
def test_blocks_are_packed_like_decoded_rows(kind: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a stack, whose parts begin within panels, and in a gated pair; some rows at a time, and some columns."""
    monkeypatch.setattr(slices, "_STORED_BYTES", 1 << 17)
    number, num_columns = int(kind), 2048 + 256
    blocks = torch.from_numpy(random_blocks(kind, (231, num_columns), np.random.default_rng(kind)))

    def decode(rows: Span) -> GroupedWeight:
        return decode_blocks(blocks[rows.start : rows.stop], BLOCK_TYPES[number])

    def keep(rows: Span) -> GroupedWeight:
        return slices.read_in_slices(
            decode, rows, num_columns, lambda some: StoredRows(blocks[some.start : some.stop], number, "x.gguf: y")
        )

    spans = [Span(0, 71), Span(71, 231)]
    stacks = [Format().pack_linear(KERNELS, *map(read, spans)) for read in (keep, decode)]
    pairs = [Format().pack_gated(KERNELS, *map(read, (Span(0, 101), Span(130, 231)))) for read in (keep, decode)]
    (kept,), (decoded,) = (one.weights for one in stacks if isinstance(one, GroupedLinear))
    assert_same_panels(kept, decoded)
    assert_same_panels(*(one.weight for one in pairs if isinstance(one, GroupedGatedLinear)))


def test_every_type_that_the_library_knows_has_its_size_here() -> None:
    for number, (name, size, num_bytes) in BLOCK_TYPES.items():
        assert (Type(number).name, gguf.GGML_QUANT_SIZES[Type(number)]) == (name, (size, num_bytes))


_SMALL_GEMMA4 = {"enable_moe_block": False, "attention_k_eq_v": False, "hidden_size_per_layer_input": 32}
_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, _OPTIONS.get(family, {})) for family in ARCHITECTURES),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "moe_layer_end_index": 2}),
    ("gemma4_text", {**_SMALL_GEMMA4, "num_global_key_value_heads": 2, "final_logit_softcapping": 30.0}),
    ("gemma4_text", {**_SMALL_GEMMA4, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False}),
]


@pytest.mark.parametrize(("family", "options"), _VARIANTS)
def test_a_converted_model_is_the_model(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    made_of = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}.get(family, family)
    source = make_checkpoint(made_of, tmp_path / "model", **options)
    if made_of != family:
        source = as_language_model_of_qwen3_vl(source, tmp_path / "language_model")
    file = tmp_path / "model-Q8_0.gguf"
    kinds = mixed(Type.Q8_0, Type.Q4_0, Type.F16, Type.BF16, Type.F32, Type.Q5_1)
    tensors = write_gguf(source, file, kinds, split_latents=family == "deepseek_v3")
    theirs = decoder_spec(json.loads((source / "config.json").read_text()))
    ours = decoder_spec(resolve_model(str(file)).config)
    assert ours == replace(without_norm_offsets(theirs), dtype="bfloat16")
    plain = CheckpointWeights(Checkpoint.open(save_plain(tmp_path / "plain", source, tensors)), theirs, torch.float32)
    _assert_same_weights(GGUFWeights(GGUFCheckpoint.open(file), ours, torch.float32), plain, ours, (1, 3))
    _assert_bad_metadata_is_named(GGUFCheckpoint.open(file))


def _assert_bad_metadata_is_named(checkpoint: GGUFCheckpoint) -> None:
    """Whatever an entry is, nothing but ValueError is raised, in one line."""
    metadata = checkpoint.header.metadata
    for key in (key for key in metadata if key.startswith(f"{checkpoint.architecture}.")):
        for value in (0, -1, 3, 1 << 31, 1.5, "x", True):
            changed = dataclasses.replace(checkpoint.header, metadata={**metadata, key: value})
            damaged = dataclasses.replace(checkpoint, header=changed)
            message = ""
            try:
                damaged.check(decoder_spec(read_config(damaged, None)))
            except ValueError as error:
                message = str(error)
            assert "\n" not in message, key


def test_every_architecture_is_tested() -> None:
    assert set(known_architectures) == set(ARCHITECTURES.values())
    assert set(ARCHITECTURES) <= set(known_families())


def test_blocks_of_256_in_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "_SLICE_ELEMENTS", 1 << 14)
    options: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "rope_parameters": _LLAMA3,
        "attention_bias": True,
    }
    source = make_checkpoint("llama", tmp_path / "model", **options)
    file = tmp_path / "model-00001-of-00005.gguf"
    tensors = write_gguf(source, tmp_path / "model.gguf", mixed(*_PACKED), split_max_tensors=12)
    assert len(list(tmp_path.glob("*-of-00005.gguf"))) == 5
    spec = decoder_spec(resolve_model(str(file.with_name("model-00003-of-00005.gguf"))).config)
    theirs = decoder_spec(json.loads((source / "config.json").read_text()))
    frequencies = [
        torch.tensor(one.layers[0].attention.positions.rope.inv_freq)  # type: ignore[attr-defined]
        for one in (spec, theirs)
    ]
    torch.testing.assert_close(*frequencies, rtol=1e-6, atol=0)
    plain = CheckpointWeights(Checkpoint.open(save_plain(tmp_path / "plain", source, tensors)), theirs, torch.float32)
    weights = GGUFWeights(GGUFCheckpoint.open(file), spec, torch.float32)
    _assert_same_weights(weights, plain, spec, (1, 2, 3))
    labels = set()
    for name, shape in parameters(spec):
        if len(shape) == 2 and (packed := weights.get_packed(name, (None, None))) is not None:
            labels.add(packed.label)
    assert labels == set(PACKED_TYPES)


def test_log_probabilities_are_those_of_transformers(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "rope_parameters": _LLAMA3,
    }
    source = make_checkpoint("llama", tmp_path / "model", **options)
    tensors = write_gguf(source, tmp_path / "x-Q4_K_M.gguf", mixed(Type.Q4_K, Type.Q6_K, Type.Q5_0))
    plain = save_plain(tmp_path / "plain", source, tensors)
    token_ids = torch.randint(0, 256, (12,), generator=torch.Generator().manual_seed(1))
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager")
    with torch.no_grad():
        expected = model(token_ids[None]).logits[0].log_softmax(1)
    # The folder has one quant, so its name is enough.
    for name, tensor in ((tmp_path / "x-Q4_K_M.gguf", 1), (tmp_path, 2)):
        engine, executor = start_engine(name, tensor=tensor, dtype="float32")
        params = SamplingParams(max_tokens=1, prompt_logprobs=20)
        engine.add_request(Request(request_id="a", prompt_token_ids=token_ids.tolist(), sampling=params))
        found = [scores for output in engine.step() for scores in output.prompt_logprobs or []]
        executor.close()
        assert len(found) == len(token_ids) - 1
        for row, scores in zip(expected, found, strict=False):
            torch.testing.assert_close(torch.tensor(scores.top_logprobs), row[scores.top_ids], atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_rank_holds_as_many_bytes_as_planned(tied: bool, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "tie_word_embeddings": tied,
    }
    source = make_checkpoint("llama", tmp_path / "model", **sizes)
    write_gguf(source, tmp_path / "x-Q4_K_M.gguf", mixed(Type.Q4_K, Type.Q6_K, Type.Q5_0))
    options = {"model": str(tmp_path / "x-Q4_K_M.gguf"), "device": "cpu", "cpu_threads": 1}
    setup = resolve_here(EngineConfig.from_options(**options))
    report = Worker(setup, open_backend("cpu", 0, threads=1), make_single_rank_groups()).load()
    assert report.weight_bytes == pytest.approx(setup.weights[0].num_bytes, rel=0.02)


def test_what_is_said_of_a_file(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "model", num_hidden_layers=1)
    write_gguf(source, tmp_path / "x-Q8_0.gguf", mixed(Type.Q8_0))
    found = resolve_here(EngineConfig.from_options(model=f"{tmp_path}:q8_0", load_format="gguf", quantization="gguf"))
    assert (found.dtype, found.model.load_format, str(found.model.stored)) == ("bfloat16", "gguf", "gguf, Q8_0")
    for options, says in (
        ({"quantization": "gptq"}, "quantization gptq: this checkpoint is quantized as gguf"),
        ({"load_format": "safetensors"}, "load_format is safetensors, and .* is a GGUF file"),
    ):
        with pytest.raises(ValueError, match=says):
            resolve_here(EngineConfig.from_options(model=str(tmp_path / "x-Q8_0.gguf"), **options))


def test_files_beside_a_model_are_named_by_what_they_are(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "model", num_hidden_layers=1)
    write_gguf(source, tmp_path / "x-Q8_0.gguf", mixed(Type.Q8_0))
    for name, architecture, kind, what in (
        ("x-mmproj-Q8_0.gguf", "clip", "mmproj", "an image or audio encoder"),
        ("encoder.gguf", "clip", None, "an image or audio encoder"),
        ("imatrix_unsloth.gguf", "llama", "imatrix", "an importance matrix"),
        ("lora.gguf", "llama", "adapter", r"an adapter \(LoRA\)"),
    ):
        writer = gguf.GGUFWriter(tmp_path / name, architecture)
        if kind is not None:
            writer.add_type(kind)
        writer.add_tensor("x.weight", np.zeros(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ValueError, match=rf"{name}: general\..* says that this is {what}, no language model; give"):
            resolve_model(str(tmp_path / name))
    for name in ("encoder.gguf", "lora.gguf"):  # such names say nothing
        (tmp_path / name).unlink()
    assert resolve_model(str(tmp_path)).gguf == tmp_path / "x-Q8_0.gguf"


def test_a_configuration_beside_may_be_of_another_model(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "model", num_hidden_layers=1)
    file = tmp_path / "x-Q8_0.gguf"
    write_gguf(source, file, mixed(Type.Q8_0))
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve_model(str(file)).config["hidden_size"] == 64
    for key, says in (("hidden_size", "embedding_length is 64"), ("num_attention_heads", "attention.head_count is 4")):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: 128}))
        with pytest.raises(ValueError, match=rf"beside it is of another model \({key} is 128, .* {says}\); move one"):
            resolve_model(str(file))


def test_a_plan_counts_the_bytes_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    source = make_checkpoint("llama", tmp_path / "model", **options)
    write_gguf(source, tmp_path / "x-Q4_K_M.gguf", mixed(Type.Q4_K, Type.Q6_K, Type.Q5_1))
    for name in (tmp_path, f"{tmp_path}:q4_k_m"):
        model = find_model(str(name))
        assert (model.name, model.engine_refusal) == (str(name), "")
    stored, checkpoint = model.stored(), model.checkpoint
    assert checkpoint is not None
    sizes = {
        key: stored.num_bytes(name, shape)
        for name, shape in parameters(model.spec)
        if len(shape) == 2 and name not in ("embed.weight", "lm_head.weight")
        for key in [checkpoint.find(name, shape, model.spec).key]
    }
    assert sizes == {key: checkpoint.tensors[key].num_bytes for key in sizes}
    assert len({stored.layer_class(0), stored.layer_class(1)}) == 2
    assert main(["plan", str(tmp_path), "--gpus", "1xL4", "--max-model-len", "128", "--input-len", "64",
                 "--output-len", "16", "--json"]) == 0  # fmt: skip
    plan = json.loads(capsys.readouterr().out)
    dense = 2 * sum(math.prod(shape) for _, shape in parameters(model.spec))
    assert plan["layouts"][0]["weight_bytes"] == dense, "GPUs make the weights of GGUF files dense"
    assert plan["commands"]["shardline"].startswith(f"shardline serve {tmp_path}")
    with pytest.raises(ValueError, match="has no quant Q8_0; it has Q4_K_M"):
        find_model(f"{tmp_path}:Q8_0")
    write_gguf(source, tmp_path / "x-Q4_K_M.gguf", mixed(Type.TQ1_0))
    assert "has type TQ1_0; supported" in find_model(str(tmp_path)).engine_refusal


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"llama.embedding_length": 128}, Type.F32, r"token_embd.weight has shape \[256, 256\], not \[256, 128\]"),
        ({"llama.block_count": 2}, Type.F32, "blk.1.attn_norm.weight is missing"),
        ({"llama.attention.head_count": [4, 2]}, Type.F32, "head_count differs between layers"),
        (
            {"general.architecture": "rwkv7"},
            Type.F32,
            "architecture is 'rwkv7', which is not supported; supported",
        ),
        ({"llama.block_count": 1 << 31}, Type.F32, "block_count is 2147483648, and the file has"),
        ({"llama.rope.scaling.type": "spiral"}, Type.F32, "rope.scaling.type is 'spiral', which is not supported"),
        ({}, Type.TQ1_0, "has type TQ1_0; supported: F32, F16, BF16, Q4_0"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], kind: Type, says: str, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    source = make_checkpoint("llama", tmp_path / "model", num_hidden_layers=1, hidden_size=256)
    write_gguf(source, file, mixed(kind), metadata=changes)
    with pytest.raises(ValueError, match=says) as raised:
        resolve_here(EngineConfig.from_options(model=str(file)))
    assert "x.gguf" in str(raised.value)


def test_scales_that_are_no_numbers_are_named_as_they_load(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "model", num_hidden_layers=1)
    file = tmp_path / "x.gguf"
    write_gguf(source, file, mixed(Type.Q4_0))
    tensor = GGUFCheckpoint.open(file).tensors["blk.0.ffn_gate.weight"]
    content = bytearray(file.read_bytes())
    place = tensor.offset + 20 * tensor.row_bytes  # behind the rows that tell the form
    content[place : place + 2] = b"\x00\x7e"
    file.write_bytes(content)
    spec = decoder_spec(resolve_model(str(file)).config)
    weights = GGUFWeights(GGUFCheckpoint.open(file), spec, torch.float32)
    name = "layers.0.feed_forward.gate.weight"
    says = r"x\.gguf: blk\.0\.ffn_gate\.weight has scales that are NaN or infinite"
    with pytest.raises(ValueError, match=says):
        weights.get(name, (None, None))
    packed = weights.get_packed(name, (None, None))
    assert packed is not None
    with pytest.raises(ValueError, match=says):
        Format().pack_linear(KERNELS, packed)


def _assert_same_weights(
    ours: GGUFWeights, theirs: CheckpointWeights, spec: DecoderSpec, sizes: tuple[int, ...]
) -> None:
    for name, shape in parameters(spec):
        expected = theirs.get(name, (None,) * len(shape))
        for size in sizes:
            for rank in range(size):
                for numerics in ("exact", "fast"):
                    spans = shard(name, spec, rank, size, numerics)  # type: ignore[arg-type]
                    where = tuple(slice(None) if span is None else slice(span.start, span.stop) for span in spans)
                    assert torch.equal(ours.get(name, spans), expected[where]), (name, spans)
