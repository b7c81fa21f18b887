"""compressed-tensors (llm-compressor): groups of modules, each with its own scheme of integers or floats."""

from __future__ import annotations

from shardline.models.hf_config import HFConfig
from shardline.models.stored_weights import Packing, PackingRule, StoredRules, label_of

_GROUP_SCALE_BYTES = {"mxfp4-pack-quantized": 1, "nvfp4-pack-quantized": 1}
"""Bytes of a group's scale. Other formats have scales in 16 bits."""

USUAL = (PackingRule(Packing(label_of("int", 4), 4, block_rows=1, block_columns=128, scale_bytes=2)),)


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`."""
    groups = section.section("config_groups")
    rules = tuple(_rule(groups.section(name), section) for name in sorted(groups.values))
    if not rules:
        raise section.error("config_groups", "is missing")
    return StoredRules(rules, tuple(section.values.get("ignore") or ()))


def _rule(group: HFConfig, section: HFConfig) -> PackingRule:
    weights = group.section("weights")
    bits, kind = weights.integer("num_bits"), weights.text("type", "int")
    form = group.text("format", section.text("format", "unknown"))
    strategy = weights.text("strategy", "group" if weights.has("group_size") else "channel")
    targets = tuple(group.values.get("targets") or ("Linear",))
    label = label_of(kind, bits)
    if bits == 4 and kind == "float":
        label = "mxfp4" if form.startswith("mx") else "nvfp4"
    if strategy == "tensor":
        packing = Packing(label, bits, tensor_bytes=8)
    elif strategy == "block":
        rows, columns = weights.numbers("block_structure", 2)
        packing = Packing(label, bits, block_rows=int(rows), block_columns=int(columns), scale_bytes=4)
    elif strategy == "channel":
        packing = Packing(label, bits, block_rows=1, scale_bytes=4)
    elif strategy in ("group", "tensor_group"):
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
    return PackingRule(packing, targets)
