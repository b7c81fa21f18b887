"""Slices of checkpoints and of dummy weights: each rank's part is that part of the whole, whatever the split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardline.checkpoints.checkpoint import Checkpoint
from shardline.checkpoints.hub import resolve_model
from shardline.checkpoints.lookup import decoder_spec
from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.models.parameters import parameters
from shardline.models.partition import Span
from shardline.models.sharding import Numerics, check_tensor_parallel, shard, shard_shape
from shardline.models.spec import DecoderSpec
from shardline.runtime.loader.dummy import DeviceDummyWeights, DummyWeights
from shardline.runtime.loader.weights import CheckpointWeights, WeightSource, open_weights
from tests.models.checkpoints import FAMILIES, make_checkpoint, make_config, whole_tensors


def _assert_parts_of_the_whole(
    weights: WeightSource, whole: dict[str, torch.Tensor], spec: DecoderSpec, tp_size: int, numerics: Numerics
) -> None:
    for name, shape in parameters(spec):
        for rank in range(tp_size):
            spans = shard(name, spec, rank, tp_size, numerics)
            part = weights.get(name, spans)
            where = tuple(slice(None) if span is None else slice(span.start, span.stop) for span in spans)
            assert part.shape == shard_shape(shape, spans)
            assert part.dim() == 1 or part.stride(1) == 1, "rows may be strided, elements may not"
            assert torch.equal(part, whole[name][where]), (name, rank)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_a_checkpoint(family: str, numerics: Numerics, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path, max_shard_size="80KB")
    spec = decoder_spec(json.loads((folder / "config.json").read_text()))
    weights = CheckpointWeights(Checkpoint.open(folder), spec, torch.float32)
    whole = whole_tensors(weights, spec)
    for tp_size in (1, 2, 3, 4):
        check_tensor_parallel(spec, tp_size)
        _assert_parts_of_the_whole(weights, whole, spec, tp_size, numerics)


def test_parts_may_be_empty(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt2", tmp_path, vocab_size=5)
    spec = decoder_spec(json.loads((folder / "config.json").read_text()))
    weights = CheckpointWeights(Checkpoint.open(folder), spec, torch.float32)
    assert weights.get("embed.weight", shard("embed.weight", spec, 7, 8)).shape == (0, 64)


def test_nothing_aligns_a_tensor_in_a_file(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    spec = decoder_spec(json.loads((folder / "config.json").read_text()))
    expected = whole_tensors(CheckpointWeights(Checkpoint.open(folder), spec, torch.float32), spec)
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    (file,) = folder.glob("*.safetensors")
    text = file.read_bytes()
    size = int.from_bytes(text[:8], "little")
    file.write_bytes((size + 3).to_bytes(8, "little") + text[8 : 8 + size] + b"   " + text[8 + size :])
    weights = CheckpointWeights(Checkpoint.open(folder), spec, torch.float32)
    for name, tensor in whole_tensors(weights, spec).items():
        assert tensor.data_ptr() % 4 == 0
        assert torch.equal(tensor, expected[name])


def test_a_file_is_not_changed_by_who_reads_it(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    spec = decoder_spec(json.loads((folder / "config.json").read_text()))
    weights = CheckpointWeights(Checkpoint.open(folder), spec, torch.float32)
    values = weights.get("final_norm.weight", (None,))
    before = values.clone()
    values.zero_()
    assert torch.equal(weights.get("final_norm.weight", (None,)), before)
    assert bool(before.any())


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["auto", "float32", "bfloat16", "half"])
def test_types_are_converted(stored: str, wanted: str, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, dtype=stored)
    files = resolve_model(str(folder))
    spec = decoder_spec(files.config)
    assert spec.dtype == stored
    exact = CheckpointWeights(Checkpoint.open(folder), spec, torch.float64).get("final_norm.weight", (None,))
    dtype = getattr(torch, stored if wanted == "auto" else wanted)
    if wanted in ("float32", "bfloat16"):
        weights = open_weights(resolve_here(EngineConfig.from_options(model=str(folder), dtype=wanted, device="cpu")))
    else:
        weights = CheckpointWeights(Checkpoint.open(folder), spec, dtype)
    actual = weights.get("final_norm.weight", (None,))
    assert actual.dtype == dtype
    assert torch.equal(actual, exact.to(getattr(torch, stored)).to(dtype))


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    spec = decoder_spec(make_config("llama", num_hidden_layers=5).to_dict())
    with pytest.raises(ValueError, match=r"model\.layers\.4\..* is missing"):
        CheckpointWeights(Checkpoint.open(folder), spec, torch.float32)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_parts_of_dummy_weights(numerics: Numerics) -> None:
    config = make_config("qwen2", vocab_size=3001, intermediate_size=2100, num_hidden_layers=1)
    spec = decoder_spec(config.to_dict())
    weights = DummyWeights(spec, torch.float32, seed=1)
    whole = whole_tensors(weights, spec)
    assert whole.keys() == dict(parameters(spec)).keys()
    for tp_size in (2, 3):
        _assert_parts_of_the_whole(weights, whole, spec, tp_size, numerics)


def test_dummy_weights_are_random_but_fixed() -> None:
    spec = decoder_spec(make_config("gemma2", vocab_size=5000).to_dict())
    name, everything = "embed.weight", (None, None)
    values = DummyWeights(spec, torch.float32, seed=1).get(name, everything)
    assert torch.equal(values, DummyWeights(spec, torch.float32, seed=1).get(name, everything))
    assert not torch.equal(values, DummyWeights(spec, torch.float32, seed=2).get(name, everything))
    assert abs(values.mean()) < 2e-4
    assert abs(values.std() - 0.02) < 2e-4
    assert values.unique().numel() > 60_000
    assert values[0, :4].tolist() == pytest.approx(
        [-0.016435137018561363, 0.007827741093933582, 0.006126770284026861, -0.020378343760967255]
    ), "dummy weights of a seed are to stay what they are"


def test_dummy_norms_are_near_one() -> None:
    for family, center in (("llama", 1.0), ("gemma2", 0.0)):
        spec = decoder_spec(make_config(family).to_dict())
        weights = DummyWeights(spec, torch.float32, seed=0)
        for name in ("final_norm.weight", "layers.0.attention_norm.weight"):
            values = weights.get(name, (None,))
            assert abs(values.mean() - center) < 0.02
            assert values.std() > 0.01
    qwen3 = decoder_spec(make_config("qwen3").to_dict())
    assert abs(DummyWeights(qwen3, torch.float32, 0).get("layers.0.attention.q_norm.weight", (None,)).mean() - 1) < 0.02


def test_dummy_weights_drawn_on_the_device_do_not_depend_on_the_part(tmp_path: Path) -> None:
    spec = decoder_spec(make_config("llama").to_dict())
    name = "layers.0.feed_forward.up.weight"
    weights = DeviceDummyWeights(spec, torch.float32, 1, torch.device("cpu"))
    whole = weights.get(name, (None, None))
    assert torch.equal(weights.get(name, (Span(3, 11), Span(5, 20))), whole[3:11, 5:20])
    assert abs(whole.std() - 0.02) < 1e-3
    assert not torch.equal(whole, weights.get("layers.1.feed_forward.up.weight", (None, None)))
    assert abs(weights.get("final_norm.weight", (None,)).mean() - 1) < 0.02
