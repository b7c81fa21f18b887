"""GPTQ: 2 to 8 bits, a float16 scale and a zero point for each group, and each column's group as an int32."""

from __future__ import annotations

from shardline.models.hf_config import HFConfig
from shardline.models.stored_weights import Packing, PackingRule, StoredRules

USUAL: tuple[PackingRule, ...] = ()


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`."""
    bits = section.integer("bits")
    packing = Packing(
        f"int{bits}",
        bits,
        block_rows=1,
        block_columns=max(0, section.integer("group_size", minimum=-1)),
        scale_bytes=2,
        zero_bits=bits,
        column_bytes=4,
    )
    return StoredRules((PackingRule(packing),))
