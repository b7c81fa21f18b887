"""fp8 (e4m3): a float32 scale for each block of 128 x 128 (DeepSeek), or one for each tensor."""

from __future__ import annotations

from shardline.models.hf_config import HFConfig
from shardline.models.stored_weights import Packing, PackingRule, StoredRules, label_of

_LABEL = label_of("float", 8)
USUAL = (PackingRule(Packing(_LABEL, 8, block_rows=1, scale_bytes=4)),)
"""As engines quantize on the fly, and most published checkpoints: a scale for each output."""


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`."""
    excluded = tuple(section.values.get("modules_to_not_convert") or ())
    if not section.has("weight_block_size"):
        return StoredRules((PackingRule(Packing(_LABEL, 8, tensor_bytes=8)),), excluded)
    rows, columns = section.numbers("weight_block_size", 2)
    packing = Packing(_LABEL, 8, block_rows=int(rows), block_columns=int(columns), scale_bytes=4)
    return StoredRules((PackingRule(packing),), excluded)
