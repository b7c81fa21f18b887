"""What the GPU's kernels lack is torch's, and a part that nobody has listed is refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import defstruct
from msgspec.structs import asdict, replace

from shardline.checkpoints.lookup import decoder_spec
from shardline.deployment.deployment import FixedPool
from shardline.deployment.gpu_support import gpu_refusal, lacking_kernels
from shardline.deployment.kernel_cases import kernel_cases
from shardline.deployment.machine import Device, DeviceKind, Machine
from shardline.models.attention import GQA
from shardline.planner.catalog import find_model
from tests.deployment.machines import GIB, host, machine, resolve_on
from tests.exactness.stored import STORED
from tests.models.checkpoints import FAMILIES, make_checkpoint, make_config

LACKS = {
    "gpt_oss": {"attention": "attention sinks", "experts": "biases of experts"},
    "llama4_text": {
        "attention": "attention in chunks",
        "scale_rows": "scale of queries by position, no scale of experts' inputs",
    },
    "granite": {"scale_rows": "scale of the residual stream, no scaled logits"},
    "cohere2": {"scale_rows": "scaled logits"},
    "ministral3": {"scale_rows": "scale of queries by position"},
}


@pytest.mark.parametrize("family", LACKS)
def test_what_kernels_lack_is_named(family: str) -> None:
    lacks = lacking_kernels(decoder_spec(make_config(family).to_dict()))
    for kernel, missing in LACKS[family].items():
        named = lacks.pop(kernel).removeprefix("Triton's has no ").split(", no ")
        assert sorted(named) == sorted(missing.split(", no ")), kernel
    assert not lacks


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "qwen3_moe", "deepseek_v3", "mixtral", "gpt2", "glm4", "olmo2"]
)
def test_families_without_torch(family: str) -> None:
    assert lacking_kernels(decoder_spec(make_config(family).to_dict())) == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_is_refused(family: str) -> None:
    assert gpu_refusal(decoder_spec(make_config(family).to_dict())) == ""


def test_a_field_that_nobody_has_listed_is_refused_if_it_is_set() -> None:
    class NewGQA(GQA, frozen=True, array_like=True, tag=True):
        twist: bool = False

    spec = decoder_spec(make_config("llama").to_dict())
    values: dict[str, Any] = {name: getattr(spec.layers[0].attention, name) for name in GQA.__struct_fields__}
    layer = replace(spec.layers[0], attention=NewGQA(**values))
    assert gpu_refusal(replace(spec, layers=(layer,))).endswith("they have no NewGQA")


def test_torch_computes_what_kernels_lack(tmp_path: Path) -> None:
    model = str(make_checkpoint("gpt_oss", tmp_path))
    gpus = machine((80 * GIB, 79 * GIB))
    deployment = resolve_on(gpus, model=model)
    assert (deployment.device, deployment.kernels) == ("cuda", "own")
    assert not {"attention", "experts"} & {case.kernel for case in kernel_cases(deployment)}
    with pytest.raises(ValueError, match=r"torch would compute of gpt_oss: attention, since Triton's has no attention"):
        resolve_on(gpus, model=model, kernels="triton")
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
    assert gpu_refusal(replace(spec, layers=(layer,))).endswith("they have no NewPart")


def test_parts_that_only_the_planner_knows_are_refused() -> None:
    spec = find_model("MiniMaxAI/MiniMax-M3").spec
    assert gpu_refusal(spec).endswith("they have no PlannedGQA")
