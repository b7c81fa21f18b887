"""bitsandbytes: 4 bits (nf4, fp4) with a scale for each 64 neighbours, or int8 with a scale for each output."""

from __future__ import annotations

from shardline.models.hf_config import HFConfig
from shardline.models.stored_layout import BlockLayout, Codes, FlatLayout, Scales
from shardline.models.stored_weights import Packing, PackingRule, StoredRules, label_of

USUAL: tuple[PackingRule, ...] = ()
_BYTES = BlockLayout(codes=Codes("weight", "I8", offset=128), scales=Scales("SCB", ("F32",), factor=1 / 127), zero=128)
_TABLE_BYTES = 16 * 4


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`."""
    excluded = section.names("llm_int8_skip_modules")
    if section.flag("load_in_8bit", False):
        rule = PackingRule(Packing(label_of("int", 8), 8, block_rows=1, scale_bytes=4), layouts=(_BYTES,))
        return StoredRules((rule,), excluded, summary="int8, a scale for each output")
    kind, nested = section.text("bnb_4bit_quant_type", "fp4"), section.flag("bnb_4bit_use_double_quant", False)
    packing = Packing(
        kind, 4, block_rows=1, block_columns=64, scale_bytes=1 if nested else 4, tensor_bytes=_TABLE_BYTES
    )
    storage = section.text("bnb_4bit_quant_storage", "uint8").removeprefix("torch.")
    if storage != "uint8":
        refusal = f"bitsandbytes weights stored as {storage} are not supported, only as uint8"
        return StoredRules((PackingRule(packing, refusal=refusal),), excluded, summary=kind)
    double = " with double quantization" if nested else ""
    return StoredRules((PackingRule(packing, layouts=(FlatLayout(),)),), excluded, summary=f"{kind}{double}")
