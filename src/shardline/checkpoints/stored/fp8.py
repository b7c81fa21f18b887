"""fp8 (e4m3): a scale for each block of 128 x 128 (DeepSeek), or one for each tensor or output.

The tensor `weight_scale_inv` is multiplied, despite its name. Blocks at the ends of a weight may be smaller.
"""

from __future__ import annotations

from msgspec.structs import replace

from shardline.checkpoints.stored import modelopt
from shardline.models.hf_config import HFConfig
from shardline.models.stored_layout import SCALE_TYPES, BlockLayout, Codes, Scales
from shardline.models.stored_weights import Packing, PackingRule, StoredRules, label_of

_KINDS = ("e4m3", "e4m3fn", "float8_e4m3fn")
"""Names of e4m3: DeepSeek's and MiniMax's."""
_LABEL = label_of("float", 8)
USUAL = (PackingRule(Packing(_LABEL, 8, block_rows=1, scale_bytes=4)),)
"""As engines quantize on the fly, and most published checkpoints: a scale for each output."""


def _layout(part: str, block_rows: int, block_columns: int) -> BlockLayout:
    # scale_fmt "ue8m0": scales may be stored as the exponents of powers of two.
    scales = Scales(part, (*SCALE_TYPES, "F8_E8M0"), block_rows, block_columns)
    return BlockLayout(codes=Codes("weight", "F8_E4M3"), scales=scales, table="e4m3")


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`."""
    excluded = section.names("modules_to_not_convert") + section.names("ignored_layers")
    refusal = ""
    if (kind := section.text("fmt", "e4m3")) not in _KINDS:
        refusal = f"fp8 of kind {kind} is not supported, only e4m3"
    if not section.has("weight_block_size"):
        layouts = tuple(_layout(part, rows, 0) for part in ("weight_scale", "weight_scale_inv") for rows in (0, 1))
        packing, summary = Packing(_LABEL, 8, tensor_bytes=8), "e4m3, a scale for each tensor"
    else:
        rows, columns = section.sizes("weight_block_size", 2)
        layouts = (_layout("weight_scale_inv", rows, columns), _layout("weight_scale", rows, columns))
        packing = Packing(_LABEL, 8, block_rows=rows, block_columns=columns, scale_bytes=4)
        summary = f"e4m3, a scale for each {rows} x {columns}"
    rules: tuple[PackingRule, ...] = (PackingRule(packing, layouts=() if refusal else layouts, refusal=refusal),)
    if section.text("moe_quant_algo", "").upper() == "NVFP4":
        # ModelOpt's names of other modules are those that it left as they were: in fp8.
        refusal = "experts in NVFP4 beside other weights in fp8 are not supported"
        rules = (replace(modelopt.USUAL[0], only_experts=True, layouts=(), refusal=refusal), *rules)
        excluded, summary = (), f"{summary}; experts in NVFP4"
    return StoredRules(rules, excluded, summary=summary)
