"""Choice of the types of weights, activations, keys and values, and which of them a device can compute with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import msgspec

from shardline.checkpoints.quantization import methods
from shardline.config.engine import STORED_METHODS, EngineConfig, ModelConfig
from shardline.deployment.deployment import KernelsName
from shardline.deployment.generations import check_format
from shardline.deployment.machine import Device, DeviceKind
from shardline.models.parts import DType, KVDType
from shardline.models.sizes import OwnFormats
from shardline.models.spec import DecoderSpec
from shardline.models.stored_layout import BlockLayout, Form
from shardline.models.stored_weights import PackingRule, StoredRules, StoredWeights
from shardline.weights.base import PLAIN, FormatChoice

_DTYPES: dict[str, DType] = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16"}

_AS_CHECKPOINT = ("auto", "half", "float16")
"""Requested types for which the computation is chosen; float16 is computed as for a checkpoint in float16."""

_GPU_GROUPS = (0, 32, 64, 128)
"""Columns of a group that GPUs can keep packed; 0: the whole row."""
_CPU_GROUP_UNIT = 8
"""Columns that the CPU packs together; a group is a multiple of it."""


def choose_dtype(asked: str, checkpoint: str, stored: StoredRules) -> DType:
    """The type of weights and activations. `checkpoint` is the type that config.json names.

    Raises:
        ValueError: no kernel computes in the requested type.
    """
    if asked in _AS_CHECKPOINT:
        checkpoint = "float16" if asked != "auto" else checkpoint
        # bfloat16 is precise enough for 4 bits and a scale. Other float16 weights need float32 to keep their precision.
        return "bfloat16" if stored.is_packed else _DTYPES.get(checkpoint, "float32")
    if asked not in _DTYPES:
        raise ValueError(f"dtype {asked} is not supported; use bfloat16 or float32")
    return _DTYPES[asked]


def choose_weight_format(
    config: EngineConfig, stored: StoredRules, devices: tuple[Device, ...], kernels: KernelsName = "own"
) -> FormatChoice:
    """The format of linear weights. `devices` are those on which ranks run.

    Weights that are packed in the checkpoint stay packed, unless "none" or another format was requested, or unless
    torch computes, which has no products with them.

    Raises:
        ValueError: the devices or the checkpoint do not support the requested format.
    """
    asked = config.model.quantization
    check_statements(config.model, stored)
    is_there = stored.is_packed and config.model.load_format != "dummy"
    if asked is None or asked == stored.method:
        return _kept_format(stored, devices[0].kind) if is_there and kernels != "torch" else PLAIN
    if asked == "none":
        return PLAIN
    chosen = FormatChoice(asked)
    held = chosen.open_format()
    has_kernels = held.is_for_torch if kernels == "torch" else held.is_for_gpus or devices[0].kind == "cpu"
    if not has_kernels and held.on_gpus:
        return FormatChoice(held.on_gpus)
    if not has_kernels and kernels == "torch":
        raise ValueError(f"quantization {asked} needs the CPU's own kernels; use int8, fp8, or leave --kernels out")
    if not has_kernels:
        raise ValueError(f"quantization {asked} is for CPUs; use {held.alternatives}, or --device cpu")
    if held.takes_e4m3 and is_there:
        return _with_e4m3(asked, stored)
    if held.computes_in:
        check_format(f"quantization {asked}", held.computes_in, devices, kernels, held.alternatives)
    return chosen


def _with_e4m3(asked: str, stored: StoredRules) -> FormatChoice:
    """A format that takes e4m3 weights as they are.

    Raises:
        ValueError: the checkpoint has no such weights.
    """
    if not has_e4m3(stored):
        raise ValueError(
            f"quantization {asked} is for e4m3 weights, but this checkpoint is quantized as {stored}; leave the option "
            "out"
        )
    return msgspec.structs.replace(_kept_format(stored, "cpu"), name=asked)


def has_e4m3(stored: StoredRules) -> bool:
    """Whether some weights are e4m3."""
    return any(isinstance(layout, BlockLayout) and layout.table == "e4m3" for layout in stored.layouts)


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


def _kept_format(stored: StoredRules, device: DeviceKind) -> FormatChoice:
    """The format that a device keeps such weights in. GPUs keep 4-bit integers with zero points, and the CPU all."""
    return _format_of(general_rule(stored).layouts[0].form, device)


def general_rule(stored: StoredRules) -> PackingRule:
    """The rule for modules that no other rule names."""
    return max(stored.rules, key=lambda rule: "Linear" in rule.targets)


def stored_forms(stored: StoredWeights, types: Callable[[str], str | None]) -> Callable[[str], Form | None]:
    """The form of each weight, by its canonical name; None: it is not packed. `types` tells the type of a tensor."""

    def form_of(name: str) -> Form | None:
        form = stored.form(name)
        if form is not None and form.scales and types(f"{stored.module(name)}.{form.scales}") == "F32":
            form = form._replace(group_bytes=form.group_bytes + 2)
        return form

    return form_of


def own_formats(form_of: Callable[[str], Form | None], spec: DecoderSpec, device: DeviceKind) -> OwnFormats:
    """The format of each weight, if weights stay as the checkpoint has them."""

    @functools.cache
    def format_of(name: str) -> FormatChoice:
        return _format_of(form_of(name), device)

    @functools.cache
    def layer_class(index: int) -> Hashable:
        names = (part for part, _ in spec.layers[index].parameters(spec.hidden_size, num_experts=1))
        return tuple(format_of(f"layers.{index}.{name}") for name in names)

    return OwnFormats(format_of, layer_class)


@functools.cache
def _format_of(form: Form | None, device: DeviceKind) -> FormatChoice:
    """The format that a device keeps weights of a form in; PLAIN: it makes them dense, or they are."""
    on_gpu = device == "cuda"
    if form is None or (on_gpu and not (form.bits == 4 and form.has_zeros and form.group_size in _GPU_GROUPS)):
        return PLAIN
    if form.group_size % _CPU_GROUP_UNIT:
        return PLAIN
    return FormatChoice("packed", form.group_size, form.bits, form.group_bytes, packs_all=not on_gpu)


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


def choose_kv_dtype(
    asked: str, dtype: DType, spec: DecoderSpec, devices: tuple[Device, ...], kernels: KernelsName = "own"
) -> KVDType:
    """The type of keys and values in the cache.

    Raises:
        ValueError: the devices cannot compute with the requested type.
    """
    if asked == "auto":
        return dtype
    if devices[0].kind == "cpu" and dtype == "bfloat16":
        for attention in {layer.attention for layer in spec.layers}:
            latents = attention.latent_sizes[1:]
            if any(size % 2 for size in latents):
                raise ValueError(
                    f"kv_cache_dtype {asked} of latents with {' + '.join(map(str, latents))} elements: on a CPU, bf16 "
                    "needs even numbers; use --kv-cache-dtype auto or --dtype float32"
                )
    if asked == "int8":
        return "int8"
    check_format(f"kv_cache_dtype {asked}", "e4m3", devices, kernels, "int8")
    return "float8_e4m3fn"
