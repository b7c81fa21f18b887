"""Checkpoints are checked from their headers: each kind of damage is one ValueError that names the file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shardline.checkpoints.checkpoint import Checkpoint, read_header
from shardline.checkpoints.lookup import decoder_spec
from shardline.models.spec import DecoderSpec
from tests.models.checkpoints import make_checkpoint


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A checkpoint in one file."""
    return make_checkpoint("llama", tmp_path / "single")


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """The same in several files."""
    return make_checkpoint("llama", tmp_path / "several", max_shard_size="100KB")


def _spec(folder: Path) -> DecoderSpec:
    return decoder_spec(json.loads((folder / "config.json").read_text()))


def test_one_file_or_several_hold_the_same_tensors(single: Path, several: Path) -> None:
    one, many = Checkpoint.open(single), Checkpoint.open(several)
    assert len(one.files) == 1
    assert len(many.files) > 2
    assert one.tensors.keys() == many.tensors.keys()
    key = "model.layers.1.self_attn.k_proj.weight"
    assert one.has(key)
    assert not one.has("model.layers.9.self_attn.k_proj.weight")
    assert (one.shape(key), one.dtype(key)) == (many.shape(key), many.dtype(key)) == ((32, 64), "F32")
    one.check(_spec(single))
    many.check(_spec(several))


def test_missing_files_of_an_index_are_named(several: Path) -> None:
    files = sorted(several.glob("*.safetensors"))
    files[1].unlink()
    with pytest.raises(ValueError, match=f"lacks 1 of {len(files)} weight files: {files[1].name}"):
        Checkpoint.open(several)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}']
)
def test_corrupt_indices(several: Path, text: str) -> None:
    (several / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is corrupt"):
        Checkpoint.open(several)


def test_an_index_may_not_lead_out_of_its_folder(several: Path) -> None:
    (several / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(ValueError, match=r"\.\./secret\.safetensors"):
        Checkpoint.open(several)


def test_other_formats_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found no weights at all"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"found only pytorch_model\.bin\); convert the weights to safetensors"):
        Checkpoint.open(tmp_path)


def _with_header(file: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def _entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{not json", b"", "header is not JSON"),
        (b"[" * 100_000, b"", "header is not JSON"),
        ([], b"", "not a JSON object"),
        ({"a": 3}, b"", "'a' is malformed"),
        ({"a": _entry(data_offsets=[0])}, b"", "'a' is malformed"),
        ({"a": _entry(shape="2")}, bytes(8), "'a' is malformed"),
        ({"a": _entry(shape=[-2])}, bytes(8), "'a' is malformed"),
        ({"a": _entry(dtype="F31")}, bytes(8), "unknown type 'F31'"),
        ({"a": _entry(dtype=["F32"])}, bytes(8), r"unknown type \['F32'\]"),
        ({"a": _entry(shape=[3])}, bytes(8), "has 8 bytes for shape"),
        ({"a": _entry(), "b": _entry()}, bytes(8), "starts at byte 0 where another ends at 8"),
        ({"a": _entry(data_offsets=[8, 16])}, bytes(16), "starts at byte 8 where another ends at 0"),
        ({"a": _entry()}, bytes(7), "7 bytes of data where the header counts 8"),
        ({"a": _entry()}, bytes(9), "9 bytes of data where the header counts 8"),
    ],
)
def test_corrupt_headers(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    file = _with_header(tmp_path / "model.safetensors", header, data)
    with pytest.raises(ValueError, match=message) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


def test_files_cut_short_anywhere_are_refused(single: Path) -> None:
    file = single / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors is corrupt or truncated"):
            Checkpoint.open(single)


@settings(deadline=None)
@given(noise=st.binary(max_size=200).filter(lambda noise: b"{}" not in noise))
def test_noise_is_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "noise.safetensors"
    file.write_bytes(noise)
    with pytest.raises(ValueError, match="corrupt or truncated"):
        read_header(file)


def _change(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace (or with None remove) tensors; in the names, __ stands for a dot."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key] = tensor
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": None}, r"model\.norm\.weight is missing"),
        (
            {"lm_head__weight": torch.zeros(256, 32)},
            r"lm_head\.weight has shape \[256, 32\], not \[256, 64\]",
        ),
        (
            {"model__layers__0__mlp__up_proj__weight": torch.zeros(104, 64, dtype=torch.int8)},
            r"up_proj\.weight has type I8; supported: F32, BF16, F16, F64",
        ),
        (
            {"model__layers__0__self_attn__q_proj__bias": torch.zeros(64)},
            r"q_proj\.bias is there, but the configuration has no bias",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_configuration(single: Path, changes: dict[str, Any], message: str) -> None:
    _change(single, **changes)
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(single).check(_spec(single))


def test_only_the_first_problems_are_named(single: Path) -> None:
    save_file({"other": torch.zeros(1)}, single / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is missing; .*; and \d+ more$"):
        Checkpoint.open(single).check(_spec(single))


def test_fused_tensors_must_be_as_large_as_their_parts(tmp_path: Path) -> None:
    folder = make_checkpoint("phi3", tmp_path)
    _change(folder, model__layers__0__self_attn__qkv_proj__weight=torch.zeros(130, 64))
    with pytest.raises(ValueError, match=r"qkv_proj\.weight has shape \[130, 64\], not \[128, 64\]"):
        Checkpoint.open(folder).check(_spec(folder))


def test_buffers_and_a_tied_lm_head_are_passed_over(tmp_path: Path) -> None:
    folder = make_checkpoint("gemma", tmp_path)
    _change(folder, lm_head__weight=torch.zeros(256, 64), model__rotary_emb__inv_freq=torch.zeros(10))
    Checkpoint.open(folder).check(_spec(folder))
