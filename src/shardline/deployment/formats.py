"""Choice of the types of weights, activations, keys and values, and which of them a device can compute with."""

from __future__ import annotations

import msgspec

from shardline.config.engine import EngineConfig
from shardline.deployment.machine import Device, DeviceKind
from shardline.models.packed_weights import PackedFormat
from shardline.models.spec import MLA, DecoderSpec, DType, KVDType
from shardline.weights.base import PLAIN, FormatChoice

_DTYPES: dict[str, DType] = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16"}

_FP8_CAPABILITY = 89
"""The first GPU architecture that computes in fp8: sm_89."""


def choose_dtype(asked: str, checkpoint: str, packed: PackedFormat) -> DType:
    """The type of weights and activations. `checkpoint` is the type that config.json names.

    Raises:
        ValueError: no kernel computes in the requested type.
    """
    if asked == "auto":
        # bfloat16 is precise enough for 4 bits and a scale. Other float16 weights need float32 to keep their precision.
        return "bfloat16" if packed.is_packed else _DTYPES.get(checkpoint, "float32")
    if asked not in _DTYPES:
        raise ValueError(f"dtype {asked} is not supported; use bfloat16 or float32")
    return _DTYPES[asked]


def choose_weight_format(config: EngineConfig, packed: PackedFormat, devices: tuple[Device, ...]) -> FormatChoice:
    """The format of linear weights. `devices` are those on which ranks run.

    Weights that are packed in the checkpoint stay packed, unless "none" or another format was requested.

    Raises:
        ValueError: the devices or the checkpoint do not support the requested format.
    """
    asked = config.model.quantization
    is_there = packed.is_packed and config.model.load_format != "dummy"
    if asked is None:
        kept = msgspec.structs.replace(packed.weight_format, packs_experts=devices[0].kind == "cpu")
        return kept if is_there else PLAIN
    if asked == "none":
        return PLAIN
    chosen = FormatChoice(asked)
    held = chosen.open_format()
    gpus = tuple(device for device in devices if device.kind != "cpu")
    _check_devices(f"quantization {asked}", held.gpu_capability, held.alternatives, gpus)
    return chosen


def check_numerics(config: EngineConfig, held: FormatChoice, devices: tuple[Device, ...]) -> None:
    """Refuse fast numerics for weights whose rows cannot be split. The CPU dequantizes a weight if its groups are cut.

    Raises:
        ValueError: the configuration asks for this.
    """
    splits_rows = config.parallel.numerics == "fast" and config.parallel.tensor_parallel_size > 1
    if splits_rows and devices[0].kind == "cuda" and held.open_format().reads_packed:
        raise ValueError(
            "numerics fast splits the rows of weights, but this checkpoint packs its rows in groups; use --numerics "
            "exact, or --quantization none"
        )


def choose_kv_dtype(asked: str, dtype: DType, spec: DecoderSpec, devices: tuple[Device, ...]) -> KVDType:
    """The type of keys and values in the cache.

    Raises:
        ValueError: the devices cannot compute with the requested type.
    """
    if asked == "auto":
        return dtype
    kind: DeviceKind = devices[0].kind
    if kind == "cpu" and any(isinstance(layer.attention, MLA) for layer in spec.layers):
        raise ValueError(f"kv_cache_dtype {asked} of latent attention needs a GPU, and this is the CPU; use auto")
    if asked == "int8":
        return "int8"
    _check_devices(f"kv_cache_dtype {asked}", _FP8_CAPABILITY, "int8", devices)
    return "float8_e4m3fn"


def _check_devices(wanted: str, capability: int, alternatives: str, devices: tuple[Device, ...]) -> None:
    """Refuse CPUs, and GPUs below an architecture. `alternatives` says what to use instead."""
    for device in devices:
        if device.kind == "cpu":
            raise ValueError(f"{wanted} needs a GPU, and this is the CPU; use {alternatives}")
        number = device.capability.removeprefix("sm_")
        if number.isdecimal() and int(number) < capability:
            raise ValueError(
                f"{wanted} needs a GPU that computes in it (sm_{capability} or later), and {device.name} is "
                f"{device.capability}; use {alternatives}"
            )
