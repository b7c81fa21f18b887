"""Checkpoints whose files have other names, are something else, or lack what config.json should say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardline.checkpoints.folder_files import weight_files
from shardline.checkpoints.hub import resolve_model
from shardline.checkpoints.quantization import BESIDE
from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.planner.catalog import find_model
from tests.models.checkpoints import make_checkpoint

_PART = "m-0000{}-of-00003.safetensors"
_QWEIGHT = "model.layers.0.self_attn.q_proj.qweight"


def _touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["model.safetensors", "model-00001-of-00002.safetensors"], ["model.safetensors"]),
        (["gptq_model-4bit-128g.safetensors"], ["gptq_model-4bit-128g.safetensors"]),
        (
            ["x.safetensors", "._x.safetensors", "adapter_model.safetensors", "consolidated.safetensors"],
            ["x.safetensors"],
        ),
        ([_PART.format(i) for i in (1, 2, 3)], [_PART.format(i) for i in (1, 2, 3)]),
    ],
)
def test_files_without_an_index(names: list[str], found: list[str], tmp_path: Path) -> None:
    assert [file.name for file in weight_files(_touch(tmp_path, *names))] == found


def test_an_index_with_the_name_of_its_files(tmp_path: Path) -> None:
    _touch(tmp_path, "x-a.safetensors", "y.safetensors")
    (tmp_path / "x.safetensors.index.json").write_text('{"weight_map": {"a": "x-a.safetensors"}}')
    assert [file.name for file in weight_files(tmp_path)] == ["x-a.safetensors"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ([_PART.format(1), _PART.format(3)], r"lacks 1 of 3 weight files: m-00002-of-00003\.safetensors; download it"),
        (["m-00001-of-99999.safetensors"], r"lacks 99998 of 99999 weight files: m-00002.*, \.\.\.; download it again"),
        (
            ["a.safetensors", "b.safetensors"],
            r"has a\.safetensors, b\.safetensors, and no model.*index\.json says which",
        ),
        (["a.safetensors", _PART.format(1)], r"says which of them are the model; download the index, or keep"),
        (
            ["consolidated.safetensors"],
            r"found only consolidated\.safetensors\); this is Mistral's own format: download",
        ),
        (["adapter_model.safetensors"], r"this is an adapter \(LoRA\): merge it into its model"),
        (["model.safetensors.incomplete"], "a download was not finished: run it again"),
        (["x.gguf"], "give the GGUF file itself, or leave --load-format out"),
    ],
)
def test_files_that_are_no_checkpoint(names: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        weight_files(_touch(tmp_path, *names))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "x.gguf"])
def test_what_git_and_web_servers_leave(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "model", num_hidden_layers=1)
    model = folder / name if name == "x.gguf" else folder
    for begin, says in (
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            r"is corrupt.* \(?a Git LFS pointer, not the file itself, which `git lfs pull` gets",
        ),
        (
            "\n<!DOCTYPE html><html>Entry not found</html>\n",
            r"is corrupt.* \(?a web page, not the file itself\)?; download it again",
        ),
    ):
        (folder / name).write_text(begin)
        with pytest.raises(ValueError, match=rf"{name} {says}"):
            resolve_here(EngineConfig.from_options(model=str(model), device="cpu"))


def test_the_folder_below_is_named(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    make_checkpoint("llama", tmp_path / "snapshots" / "0123", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"has no config\.json, .*; did you mean .*/snapshots/0123\?"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("options", [{}, {"quantization": "gptq"}, {"load_format": "bitsandbytes"}])
def test_quantized_weights_that_config_json_does_not_name(options: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "model", num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensors[_QWEIGHT] = torch.zeros(8, 64, dtype=torch.int32)
    del tensors[_QWEIGHT.replace("qweight", "weight")]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    says = (
        rf"model\.safetensors has quantized weights \({_QWEIGHT}\), but .*config\.json has no quantization_config; down"
    )
    with pytest.raises(ValueError, match=says):
        resolve_here(EngineConfig.from_options(model=str(folder), device="cpu", **options))


@pytest.mark.parametrize(
    ("name", "values", "summary"),
    [
        (BESIDE[0], {"bits": 4, "group_size": 128, "desc_act": True}, "gptq, 4 bits in groups of 128, desc_act"),
        (BESIDE[0], {"w_bit": 4, "q_group_size": 64, "zero_point": True}, "awq, 4 bits in groups of 64"),
        (BESIDE[1], {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}, "awq, 4 bits in groups of 64"),
        (
            BESIDE[2],
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            "modelopt, e4m3, a scale for each tensor",
        ),
    ],
)
def test_quantization_in_a_file_beside(name: str, values: dict[str, Any], summary: str, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "model", num_hidden_layers=1)
    (folder / name).write_text(json.dumps(values))
    assert str(find_model(str(folder)).rules) == summary
    section = resolve_model(str(folder)).config["quantization_config"]
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "quantization_config": {"bits": 8}})
    )
    assert section != resolve_model(str(folder)).config["quantization_config"] == {"bits": 8}


def test_a_quant_of_a_folder_of_safetensors(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "model", num_hidden_layers=1)
    for model, load_format in ((f"{folder}:Q4_0", "auto"), (str(folder), "gguf")):
        with pytest.raises(ValueError, match=r"it has safetensors: leave out the quant, and --load-format gguf"):
            resolve_model(model, load_format=load_format)
