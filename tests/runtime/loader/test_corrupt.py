"""Damaged checkpoints are refused in one line, and nothing but ValueError is raised, however they are damaged."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardline.checkpoints.checkpoint import Checkpoint, read_header
from shardline.checkpoints.lookup import decoder_spec
from shardline.checkpoints.quantization import check_loadable, read_stored
from shardline.models.hf_config import HFConfig
from shardline.models.parameters import parameters
from shardline.runtime.loader.weights import CheckpointWeights
from tests.models.checkpoints import make_checkpoint

from .packer import pack_checkpoint
from .stored_checkpoints import Format, bitsandbytes_4bit, compressed, fp8_blocks, write_checkpoint

pytest.importorskip("compressed_tensors")

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
_INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": False}
_GROUP = {"format": "pack-quantized", "targets": ["Linear"], "weights": _INT4}
FORMATS = {
    "compressed-tensors": Format(
        {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {"group_0": _GROUP}},
        compressed("pack-quantized", **_INT4),
    ),
    "fp8": Format({"quant_method": "fp8", "weight_block_size": [24, 40]}, fp8_blocks((24, 40))),
    "bitsandbytes": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes_4bit("nf4", nested=True)
    ),
}
NAMES = (*FORMATS, "gptq")


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], bytes]]:
    """config.json and the weights of a tiny checkpoint in each format."""
    found = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp(name)
        model = make_checkpoint("llama", folder / "model", num_hidden_layers=1, vocab_size=32)
        if name == "gptq":
            pack_checkpoint(model, folder / "packed", folder / "plain", _GPTQ)
        else:
            write_checkpoint(model, folder / "packed", folder / "plain", FORMATS[name])
        config = json.loads((folder / "packed" / "config.json").read_text())
        found[name] = config, (folder / "packed" / "model.safetensors").read_bytes()
    return found


def load(folder: Path, config: dict[str, Any], data: bytes) -> None:
    """Read every weight."""
    (folder / "model.safetensors").write_bytes(data)
    spec, rules = decoder_spec(config), read_stored(HFConfig(config))
    weights = CheckpointWeights(Checkpoint.open(folder), spec, torch.float32, rules)
    for name, shape in parameters(spec):
        assert tuple(weights.get(name, (None,) * len(shape)).shape) == shape


def load_damaged(folder: Path, config: dict[str, Any], data: bytes) -> None:
    """As `load`, where a ValueError of one line is as good as an answer."""
    message = ""
    try:
        load(folder, config, data)
    except ValueError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 2000


FUZZ = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@FUZZ
@given(name=st.sampled_from(NAMES), values=st.data())
def test_bytes_anywhere(name, values, intact, tmp_path):
    config, data = intact[name]
    damaged = bytearray(data)
    for _ in range(values.draw(st.integers(1, 4))):
        place = values.draw(st.integers(0, len(data) - 1))
        noise = values.draw(st.binary(min_size=1, max_size=40))
        damaged[place : place + len(noise)] = noise
    cut = values.draw(st.none() | st.integers(0, len(data)))
    load_damaged(tmp_path, config, bytes(damaged[:cut]))


@FUZZ
@given(name=st.sampled_from(NAMES), values=st.data())
def test_headers_that_fit_the_file_but_not_the_model(name, values, intact, tmp_path):
    config, data = intact[name]
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    keys = sorted(key for key in header if key != "__metadata__")
    for _ in range(values.draw(st.integers(1, 3))):
        first, second = values.draw(st.sampled_from(keys)), values.draw(st.sampled_from(keys))
        change = values.draw(st.sampled_from(["swap", "type", "shape", "name", "value"]))
        if change == "swap":
            header[first], header[second] = header[second], header[first]
        elif change == "type":
            header[first] = {**header[first], "dtype": values.draw(st.sampled_from(["F32", "I32", "F16", "U8", "I8"]))}
        elif change == "shape":
            shape = header[first]["shape"]  # which an earlier change may have made anything
            header[first] = {**header[first], "shape": shape[::-1] if isinstance(shape, list) else [shape, shape]}
        elif change == "name":
            header[f"{first}x"] = header.pop(first)
            keys = sorted(key for key in header if key != "__metadata__")
        else:
            header[first] = {
                **header[first],
                values.draw(st.sampled_from(["dtype", "shape", "data_offsets"])): values.draw(JSON),
            }
    text = json.dumps(header).encode()
    load_damaged(tmp_path, config, struct.pack("<Q", len(text)) + text + data[8 + size :])


@FUZZ
@given(name=st.sampled_from(NAMES), values=st.data())
def test_any_quantization_config(name, values, intact, tmp_path):
    config, data = intact[name]
    section = json.loads(json.dumps(config["quantization_config"]))
    target = section
    while values.draw(st.booleans()):
        inner = [value for value in target.values() if isinstance(value, dict)]
        if not inner:
            break
        target = inner[0]
    target[values.draw(st.sampled_from(sorted(target)) | st.text(max_size=8))] = values.draw(JSON)
    load_damaged(tmp_path, {**config, "quantization_config": section}, data)


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":' + b"[" * 2_000_000,
        b'{"a":' + b"[[]," * 2_000_000,
        b'{"a":{"dtype":"F32","shape":[' + b"9999999," * 1_000_000 + b'1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 4000 + b'],"data_offsets":[0,4]}}',
    ],
    ids=["nesting", "lists", "dims", "digits"],
)
def test_header_bombs_are_refused_at_once(text, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    tracemalloc.start()
    begin = time.process_time()
    with pytest.raises(ValueError, match="corrupt or truncated"):
        read_header(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.process_time() - begin < 1
    assert peak < 8 * len(text)


def test_many_patterns_and_many_modules_take_no_time():
    ignore = [f"model.layers.{index}.mlp.gate" for index in range(1000)] + ["re:.*gate$"]
    group = {"targets": ["Linear"], "weights": _INT4, "format": "pack-quantized"}
    section = {"quant_method": "compressed-tensors", "ignore": ignore, "config_groups": {"group_0": group}}
    from shardline.models.stored_weights import RuleBook

    config = HFConfig({"quantization_config": section})
    check_loadable(config)
    book = RuleBook(read_stored(config))
    begin = time.process_time()
    for index in range(20_000):
        assert book.find(f"model.layers.3.mlp.experts.{index}.up_proj", is_expert=True) is not None
    assert time.process_time() - begin < 1
