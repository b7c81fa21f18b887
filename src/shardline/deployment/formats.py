"""Choice of the types of weights, activations, keys and values, and which of them a device can compute with."""

from __future__ import annotations

from shardline.config.engine import STORED_METHODS, EngineConfig, ModelConfig
from shardline.deployment.machine import Device, DeviceKind
from shardline.models.spec import MLA, DecoderSpec, DType, KVDType
from shardline.models.stored_layout import BlockLayout
from shardline.models.stored_weights import StoredRules, methods
from shardline.weights.base import PLAIN, FormatChoice

_DTYPES: dict[str, DType] = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16"}

_KEPT_GROUPS = (0, 32, 64, 128)
"""Columns of a group that GPUs can keep packed; 0: the whole row."""
_FP8_CAPABILITY = 89
"""The first GPU architecture that computes in fp8: sm_89."""


def choose_dtype(asked: str, checkpoint: str, stored: StoredRules) -> DType:
    """The type of weights and activations. `checkpoint` is the type that config.json names.

    Raises:
        ValueError: no kernel computes in the requested type.
    """
    if asked == "auto":
        # bfloat16 is precise enough for 4 bits and a scale. Other float16 weights need float32 to keep their precision.
        return "bfloat16" if stored.is_packed else _DTYPES.get(checkpoint, "float32")
    if asked not in _DTYPES:
        raise ValueError(f"dtype {asked} is not supported; use bfloat16 or float32")
    return _DTYPES[asked]


def choose_weight_format(config: EngineConfig, stored: StoredRules, devices: tuple[Device, ...]) -> FormatChoice:
    """The format of linear weights. `devices` are those on which ranks run.

    On GPUs, weights that are packed in the checkpoint stay packed, unless "none" or another format was requested.

    Raises:
        ValueError: the devices or the checkpoint do not support the requested format.
    """
    asked, on_gpu = config.model.quantization, devices[0].kind == "cuda"
    check_statements(config.model, stored)
    kept = PLAIN if config.model.load_format == "dummy" else _kept_format(stored)
    if asked is None or asked == stored.method:
        return kept if on_gpu else PLAIN
    if asked == "none":
        return PLAIN
    chosen = FormatChoice(asked)
    held = chosen.open_format()
    _check_devices(f"quantization {asked}", held.gpu_capability, held.alternatives, devices)
    if not held.reads_packed:
        return chosen
    if kept == PLAIN:
        raise ValueError(f"quantization {asked} is for GPTQ and AWQ checkpoints, and this is none; use int4")
    return kept


def check_statements(model: ModelConfig, stored: StoredRules) -> None:
    """Refuse options that state how the checkpoint is quantized, if it is not so.

    Raises:
        ValueError: the message says what the checkpoint is.
    """
    found = f"quantized as {stored.method}" if stored.is_packed else "not quantized"
    asked, load_format = model.quantization, model.load_format
    is_method = asked is not None and asked.replace("-", "_") in methods()
    if is_method and asked != stored.method and (stored.is_packed or asked in STORED_METHODS):
        raise ValueError(f"quantization {asked}: this checkpoint is {found}; leave quantization out")
    if load_format in STORED_METHODS and load_format != stored.method:
        raise ValueError(f"load_format {load_format}: this checkpoint is {found}; leave load_format out")


def _kept_format(stored: StoredRules) -> FormatChoice:
    """The format that GPUs keep such weights in."""
    layouts = [layout for layout in stored.layouts if isinstance(layout, BlockLayout)]
    sizes = {layout.scales.block_columns for layout in layouts}
    packed = all(layout.codes.bits == 4 and layout.zeros and layout.ordered for layout in layouts)
    if len(layouts) != len(stored.layouts) or len(sizes) != 1 or not packed or not sizes <= set(_KEPT_GROUPS):
        return PLAIN
    return FormatChoice("w4a16", sizes.pop())


def check_numerics(config: EngineConfig, held: FormatChoice) -> None:
    """Refuse fast numerics for weights whose rows cannot be split.

    Raises:
        ValueError: the configuration asks for this.
    """
    parallel = config.parallel
    if held.open_format().reads_packed and parallel.numerics == "fast" and parallel.tensor_parallel_size > 1:
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


def _check_devices(wanted: str, capability: int | None, alternatives: str, devices: tuple[Device, ...]) -> None:
    """Refuse devices below a GPU architecture; None: every device works. `alternatives` says what to use instead."""
    if capability is None:
        return
    for device in devices:
        if device.kind == "cpu":
            raise ValueError(f"{wanted} needs a GPU, and this is the CPU; use {alternatives}")
        number = device.capability.removeprefix("sm_")
        if number.isdecimal() and int(number) < capability:
            raise ValueError(
                f"{wanted} needs a GPU that computes in it (sm_{capability} or later), and {device.name} is "
                f"{device.capability}; use {alternatives}"
            )
