"""Models that only CPUs run are refused in words, and a part that nobody has listed is refused too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import defstruct
from msgspec.structs import asdict, replace

from shardline.checkpoints.lookup import decoder_spec
from shardline.deployment.deployment import FixedPool
from shardline.deployment.gpu_support import gpu_refusal
from shardline.deployment.machine import Device, DeviceKind, Machine
from shardline.models.attention import GQA
from shardline.planner.catalog import find_model
from tests.deployment.machines import GIB, host, machine, resolve_on
from tests.exactness.stored import STORED
from tests.models.checkpoints import make_checkpoint, make_config

REFUSED = {
    "gpt_oss": "norm that rounds once, no attention sinks, no bias of a router's logits, no biases of experts",
    "llama4_text": "attention in chunks, no norm after rope, no scale of experts' inputs, no scale of queries",
    "olmo2": "norm that rounds once, no norm over all heads, no blocks without a norm before them",
    "granite": "scaled logits, no scale of the residual stream",
    "cohere2": "scaled logits, no parallel blocks",
    "ministral3": "scale of queries by position",
    "gemma4_text": "layers that read the cache of another layer",
}


@pytest.mark.parametrize("family", REFUSED)
def test_refusals_name_what_is_missing(family: str) -> None:
    refusal = gpu_refusal(decoder_spec(make_config(family).to_dict()))
    assert refusal.startswith(f"{family} runs on CPUs only: the GPU kernels have no ")
    for missing in REFUSED[family].split(", no "):
        assert missing in refusal


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "deepseek_v3", "mixtral", "gpt2", "glm4"])
def test_supported_families(family: str) -> None:
    assert gpu_refusal(decoder_spec(make_config(family).to_dict())) == ""


def test_a_field_that_nobody_has_listed_is_refused_if_it_is_set() -> None:
    class NewGQA(GQA, frozen=True, array_like=True, tag=True):
        twist: bool = False

    spec = decoder_spec(make_config("llama").to_dict())
    values: dict[str, Any] = {name: getattr(spec.layers[0].attention, name) for name in GQA.__struct_fields__}
    layer = replace(spec.layers[0], attention=NewGQA(**values))
    assert gpu_refusal(replace(spec, layers=(layer,))).endswith("the GPU kernels have no NewGQA")


def test_torch_runs_what_the_gpu_kernels_refuse(tmp_path: Path) -> None:
    model = str(make_checkpoint("gpt_oss", tmp_path))
    gpus = machine((80 * GIB, 79 * GIB))
    with pytest.raises(ValueError, match=r"attention sinks.*; --kernels torch runs it there too"):
        resolve_on(gpus, model=model)
    deployment = resolve_on(gpus, model=model, kernels="torch")
    assert (deployment.device, deployment.kernels, deployment.step_timeout) == ("cuda", "torch", 300.0)


@pytest.mark.parametrize(("kind", "bytes_of"), [("xpu", "fp8"), ("mps", "int8")])
def test_other_devices_have_torch_only(kind: DeviceKind, bytes_of: str) -> None:
    device = Device(kind, "a card", 16 * GIB, 15 * GIB)
    here = Machine((replace(host(), devices=(*host().devices, device, device)),))
    found = resolve_on(here, device=kind, tensor_parallel_size=2, kv_cache_dtype=bytes_of, quantization=bytes_of)
    assert (found.device, found.kernels, found.collectives) == (kind, "torch", "gloo")
    assert [place.device for place in found.placements[0]] == [1, 2]
    assert isinstance(found.cache.pool, FixedPool)
    with pytest.raises(ValueError, match=f"device {kind}: torch finds none on node; use --device cpu"):
        resolve_on(machine(), device=kind)
    with pytest.raises(ValueError, match=f"use 'gloo' with device {kind}"):
        resolve_on(here, device=kind, collectives="nccl")
    assert resolve_on(here).device == "cpu"


def test_torch_holds_no_packed_weights(tmp_path: Path) -> None:
    model = str(STORED["gptq"].make(tmp_path))
    assert resolve_on(machine(), model=model).keeps_packed
    assert not resolve_on(machine(), model=model, kernels="torch").keeps_packed


TRAITS = {
    "llama": ["projections", "score", "positions", "mask", "norms", "kv"],
    "deepseek_v3": ["projections", "score"],
}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in TRAITS.items() for name in names])
def test_every_part_of_attention_is_looked_into(family: str, name: str) -> None:
    spec = decoder_spec(make_config(family).to_dict())
    attention = spec.layers[0].attention
    trait = getattr(attention, name)
    new = defstruct("NewPart", [("twist", bool, False)], bases=(type(trait),), frozen=True, array_like=True)
    part = new(**asdict(trait))
    layer = replace(spec.layers[0], attention=replace(attention, **{name: part}))
    assert gpu_refusal(replace(spec, layers=(layer,))).endswith("the GPU kernels have no NewPart")


def test_parts_that_only_the_planner_knows_are_refused() -> None:
    spec = find_model("deepseek-ai/DeepSeek-V3.2").spec
    assert gpu_refusal(spec).endswith("the GPU kernels have no SparseMLA")
