"""MXFP4 (OCP microscaling): 4 bits, and one byte with the exponent of 32 neighbours. Only experts are packed."""

from __future__ import annotations

from shardline.models.hf_config import HFConfig
from shardline.models.stored_weights import Packing, PackingRule, StoredRules

PACKING = Packing("mxfp4", 4, block_rows=1, block_columns=32, scale_bytes=1)
USUAL = (PackingRule(PACKING, only_experts=True),)


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`."""
    return StoredRules(USUAL, tuple(section.values.get("modules_to_not_convert") or ()))
