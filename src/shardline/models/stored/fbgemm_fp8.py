"""FBGEMM: e4m3 with a float32 scale for each output (Llama 3.1 405B)."""

from __future__ import annotations

from shardline.models.hf_config import HFConfig
from shardline.models.stored_weights import Packing, PackingRule, StoredRules, label_of

USUAL: tuple[PackingRule, ...] = ()


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`."""
    packing = Packing(label_of("float", 8), 8, block_rows=1, scale_bytes=4)
    return StoredRules((PackingRule(packing),), tuple(section.values.get("modules_to_not_convert") or ()))
