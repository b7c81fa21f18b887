"""GGUF files against the `gguf` package, and against the checkpoints from which they were made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from msgspec.structs import replace

from shardline.models.checkpoint import Checkpoint
from shardline.models.gguf.checkpoint import GGUFCheckpoint
from shardline.models.gguf.header import BLOCK_TYPES, PACKED_TYPES
from shardline.models.gguf.norms import without_norm_offsets
from shardline.models.hub import resolve_model
from shardline.models.lookup import decoder_spec, known_families
from shardline.models.parameters import parameters
from shardline.models.sharding import shard
from shardline.models.spec import DecoderSpec
from shardline.runtime.loader.gguf import GGUFWeights
from shardline.runtime.loader.gguf_blocks import decode_blocks
from shardline.runtime.loader.weights import CheckpointWeights
from tests.models.checkpoints import make_checkpoint

from .gguf_writer import ARCHITECTURES, mixed, random_blocks, save_plain, write_gguf

_PACKED = [Type[name] for name in PACKED_TYPES]
_OPTIONS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"decoder_sparse_step": 1, "norm_topk_prob": False},
    "qwen3_moe": {"mlp_only_layers": []},
    "gemma2": {"query_pre_attn_scalar": 20},
    "gemma3_text": {"query_pre_attn_scalar": 20},
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


def test_every_type_that_the_library_knows_has_its_size_here() -> None:
    for number, (name, size, num_bytes) in BLOCK_TYPES.items():
        assert (Type(number).name, gguf.GGML_QUANT_SIZES[Type(number)]) == (name, (size, num_bytes))


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_converted_model_is_the_model(family: str, tmp_path: Path) -> None:
    source = make_checkpoint(family, tmp_path / "model", **_OPTIONS.get(family, {}))
    file = tmp_path / "model-Q8_0.gguf"
    kinds = mixed(Type.Q8_0, Type.Q4_0, Type.F16, Type.BF16, Type.F32, Type.Q5_1)
    tensors = write_gguf(source, file, kinds, split_latents=family == "deepseek_v3")
    theirs = decoder_spec(json.loads((source / "config.json").read_text()))
    ours = decoder_spec(resolve_model(str(file)).config)
    assert ours == replace(without_norm_offsets(theirs), dtype="bfloat16")
    plain = CheckpointWeights(Checkpoint.open(save_plain(tmp_path / "plain", source, tensors)), theirs, torch.float32)
    _assert_same_weights(GGUFWeights(GGUFCheckpoint.open(file), ours, torch.float32), plain, ours, (1, 3))


def test_architectures_without_a_converter_here_wait_for_their_model_types() -> None:
    from shardline.models.gguf.config import ARCHITECTURES as known

    waiting = {"granite": "granite", "mistral3": "ministral3", "smollm3": "smollm3"}
    assert set(known) == set(ARCHITECTURES.values()) | set(waiting)
    assert set(ARCHITECTURES) <= set(known_families())


def test_blocks_of_256_in_every_layout(tmp_path: Path) -> None:
    options = {"hidden_size": 256, "intermediate_size": 512, "rope_parameters": _LLAMA3, "attention_bias": True}
    source = make_checkpoint("llama", tmp_path / "model", **options)
    file = tmp_path / "model-00001-of-00005.gguf"
    tensors = write_gguf(source, tmp_path / "model.gguf", mixed(*_PACKED), split_max_tensors=12)
    assert len(list(tmp_path.glob("*-of-00005.gguf"))) == 5
    spec = decoder_spec(resolve_model(str(file.with_name("model-00003-of-00005.gguf"))).config)
    theirs = decoder_spec(json.loads((source / "config.json").read_text()))
    frequencies = [
        torch.tensor(one.layers[0].attention.rope.inv_freq)  # type: ignore[union-attr]
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
