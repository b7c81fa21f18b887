"""compressed-tensors (llm-compressor): groups of modules, each with its own scheme of integers or floats."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from shardline.models.hf_config import HFConfig
from shardline.models.stored_layout import EXPONENT_TYPES, BlockLayout, Codes, Scales
from shardline.models.stored_weights import Packing, PackingRule, StoredRules, label_of

_GROUP_SCALE_BYTES = {"mxfp4-pack-quantized": 1, "nvfp4-pack-quantized": 1}
"""Bytes of a group's scale. Other formats have scales in 16 bits."""

USUAL = (
    PackingRule(Packing(label_of("int", 4), 4, block_rows=1, block_columns=128, scale_bytes=2)),
    PackingRule(Packing(label_of("int", 8), 8, block_rows=1, scale_bytes=2)),
)

_GROUPS_OUT_OF_ORDER = ("group", "dynamic", True)
"""Values of `actorder` with which a file names each column's group."""

_E4M3 = BlockLayout(codes=Codes("weight", "F8_E4M3"), scales=Scales("weight_scale"), table="e4m3")
_BYTES = BlockLayout(codes=Codes("weight", "I8", offset=128), scales=Scales("weight_scale"), zero=128)
_BYTE_ZEROS = Codes("weight_zero_point", "I8", offset=128)
_FP4 = Codes("weight_packed", "U8", 4)


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`."""
    groups = section.section("config_groups")
    names = [name for name in sorted(groups.values) if groups.section(name).has("weights")]
    rules = tuple(_rule(groups.section(name), section) for name in names)
    if not rules:
        raise section.error("config_groups", "is missing")
    if problem := _unsupported(section):
        rules = tuple(replace(rule, layouts=(), refusal=problem) for rule in rules)
    unused = ("kv_cache_scheme",) if section.has("kv_cache_scheme") else ()
    forms = dict.fromkeys(groups.section(name).text("format", section.text("format", "unknown")) for name in names)
    return StoredRules(rules, section.names("ignore"), summary=" and ".join(forms), unused=unused)


def _unsupported(section: HFConfig) -> str:
    """What else the checkpoint does to weights, if the engine cannot undo it; empty: nothing."""
    sparsity = section.section("sparsity_config").text("format", "dense")
    if sparsity != "dense":
        return f"compressed-tensors with sparsity ({sparsity}) is not supported"
    if section.section("transform_config").section("config_groups").values:
        return "compressed-tensors with transforms (transform_config) is not supported"
    return ""


def _rule(group: HFConfig, section: HFConfig) -> PackingRule:
    weights = group.section("weights")
    bits, kind = weights.integer("num_bits"), weights.text("type", "int")
    form = group.text("format", section.text("format", "unknown"))
    strategy = weights.text("strategy", "group" if weights.has("group_size") else "channel")
    targets = group.names("targets") or ("Linear",)
    label = label_of(kind, bits)
    if bits == 4 and kind == "float":
        label = "mxfp4" if form.startswith("mx") else "nvfp4"
    blocks: dict[str, Any] = {"block_rows": 1}
    if strategy == "tensor":
        blocks["block_rows"] = 0
        packing = Packing(label, bits, tensor_bytes=8)
    elif strategy == "block":
        rows, columns = weights.sizes("block_structure", 2)
        blocks = {"block_rows": rows, "block_columns": columns}
        packing = Packing(label, bits, **blocks, scale_bytes=4)
    elif strategy == "channel":
        packing = Packing(label, bits, block_rows=1, scale_bytes=4)
    elif strategy in ("group", "tensor_group"):
        blocks = {"block_rows": 1, "block_columns": weights.integer("group_size"), "whole_blocks": True}
        packing = Packing(
            label,
            bits,
            block_rows=1,
            block_columns=weights.integer("group_size"),
            scale_bytes=_GROUP_SCALE_BYTES.get(form, 2),
            zero_bits=0 if weights.flag("symmetric", True) else bits,
            tensor_bytes=8 if strategy == "tensor_group" else 0,
        )
    else:
        raise weights.error("strategy", f"{strategy!r} is not known")
    layout = _layout(form, kind, bits, blocks, weights.flag("symmetric", True))
    if layout is not None and _quantizes_input(group, layout, form):
        layout = replace(layout, quantizes_input=True)
    if layout is not None and weights.values.get("actorder") in _GROUPS_OUT_OF_ORDER:
        layout = replace(layout, ordered=False)
    if layout is None:
        problem = f"compressed-tensors format {form} with {kind} of {bits} bits is not supported"
        return PackingRule(packing, targets, refusal=problem)
    return PackingRule(packing, targets, layouts=(layout,))


def _quantizes_input(group: HFConfig, layout: BlockLayout, form: str) -> bool:
    """Whether the scheme multiplies 8-bit integers: one scale and no zero points for a row of the weight."""
    if form != "int-quantized" or layout.zeros is not None or layout.scales.block_columns:
        return False
    inputs = group.section("input_activations")
    return inputs.has("num_bits") and inputs.integer("num_bits") == 8 and inputs.text("type", "int") == "int"


def _layout(form: str, kind: str, bits: int, blocks: dict[str, Any], symmetric: bool) -> BlockLayout | None:
    """The tensors of a scheme; None: the engine does not load it."""
    if kind == "float" and bits == 8 and form in ("float-quantized", "naive-quantized"):
        return replace(_E4M3, scales=replace(_E4M3.scales, **blocks))
    if not symmetric and blocks["block_rows"] != 1:
        return None
    if kind == "int" and bits == 8 and form in ("int-quantized", "naive-quantized"):
        zeros = None if symmetric else _BYTE_ZEROS
        return replace(_BYTES, scales=replace(_BYTES.scales, **blocks), zeros=zeros)
    if kind == "int" and bits in (4, 8) and form == "pack-quantized":
        return BlockLayout(
            codes=Codes("weight_packed", "I32", bits),
            scales=Scales("weight_scale", **blocks),
            zeros=None if symmetric else Codes("weight_zero_point", "I32", bits, along="rows"),
            zero=1 << (bits - 1),
            group_index="weight_g_idx",
            weight_shape="weight_shape",
        )
    if kind == "float" and bits == 4 and form == "nvfp4-pack-quantized":
        scales = Scales("weight_scale", ("F8_E4M3",), divisor="weight_global_scale", **blocks)
        return BlockLayout(codes=_FP4, scales=scales, table="e2m1")
    if kind == "float" and bits == 4 and form == "mxfp4-pack-quantized":
        return BlockLayout(codes=_FP4, scales=Scales("weight_scale", EXPONENT_TYPES, **blocks), table="e2m1")
    return None
