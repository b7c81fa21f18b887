"""MXFP4 (OCP microscaling): 4 bits, and one byte with the exponent of 32 neighbours. Only experts are packed."""

from __future__ import annotations

from shardline.models.hf_config import HFConfig
from shardline.models.stored_layout import EXPONENT_TYPES, BlockLayout, Codes, Scales
from shardline.models.stored_weights import Packing, PackingRule, StoredRules

PACKING = Packing("mxfp4", 4, block_rows=1, block_columns=32, scale_bytes=1)
_LAYOUT = BlockLayout(
    codes=Codes("_blocks", "U8", 4, block_columns=32),
    scales=Scales("_scales", EXPONENT_TYPES, block_columns=32, whole_blocks=True),
    table="e2m1",
)
"""All experts of a layer are stacked: `experts.gate_up_proj_blocks` [E, N, K/32, 16]."""
USUAL = (PackingRule(PACKING, only_experts=True, layouts=(_LAYOUT,)),)


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`."""
    return StoredRules(USUAL, section.names("modules_to_not_convert"), summary="e2m1 in blocks of 32")
