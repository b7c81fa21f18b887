"""FBGEMM: e4m3 with a float32 scale for each output (Llama 3.1 405B)."""

from __future__ import annotations

from msgspec.structs import replace

from shardline.models.hf_config import HFConfig
from shardline.models.stored_layout import BlockLayout, Codes, Scales
from shardline.models.stored_weights import Packing, PackingRule, StoredRules, label_of

USUAL: tuple[PackingRule, ...] = ()
_LAYOUT = BlockLayout(codes=Codes("weight", "F8_E4M3"), scales=Scales("weight_scale"), table="e4m3")


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`."""
    layout = replace(_LAYOUT, input_bound=section.optional_number("activation_scale_ub", None) or 0.0)
    packing = Packing(label_of("float", 8), 8, block_rows=1, scale_bytes=4)
    excluded = section.names("modules_to_not_convert")
    return StoredRules((PackingRule(packing, layouts=(layout,)),), excluded, summary="e4m3, a scale for each output")
