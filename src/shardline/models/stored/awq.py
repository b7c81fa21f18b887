"""AWQ: 4 bits, a float16 scale and a zero point for each group of neighbours along the input dim."""

from __future__ import annotations

from shardline.models.hf_config import HFConfig
from shardline.models.stored_weights import Packing, PackingRule, StoredRules

USUAL: tuple[PackingRule, ...] = ()


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`."""
    bits = section.integer("bits", 4)
    group = max(0, section.integer("group_size", 128, minimum=-1))
    packing = Packing(f"int{bits}", bits, block_rows=1, block_columns=group, scale_bytes=2, zero_bits=bits)
    return StoredRules((PackingRule(packing),), tuple(section.values.get("modules_to_not_convert") or ()))
