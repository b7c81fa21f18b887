"""NVIDIA's ModelOpt: NVFP4 (4 bits, an e4m3 scale for 16 neighbours, a float32 scale for the tensor), or e4m3."""

from __future__ import annotations

from shardline.models.hf_config import HFConfig
from shardline.models.stored_layout import BlockLayout, Codes, Scales
from shardline.models.stored_weights import Packing, PackingRule, StoredRules, label_of

_GROUP = 16
_NVFP4 = PackingRule(
    Packing("nvfp4", 4, block_rows=1, block_columns=_GROUP, scale_bytes=1, tensor_bytes=8),
    layouts=(
        BlockLayout(
            codes=Codes("weight", "U8", 4),
            scales=Scales(
                "weight_scale",
                ("F8_E4M3",),
                block_columns=_GROUP,
                whole_blocks=True,
                multiplier="weight_scale_2",
            ),
            table="e2m1",
        ),
    ),
)
_E4M3 = PackingRule(
    Packing(label_of("float", 8), 8, tensor_bytes=8),
    layouts=(BlockLayout(codes=Codes("weight", "F8_E4M3"), scales=Scales("weight_scale", block_rows=0), table="e4m3"),),
)
_RULES = {"NVFP4": _NVFP4, "FP8": _E4M3}
_SUMMARIES = {"NVFP4": f"NVFP4 in groups of {_GROUP}", "FP8": "e4m3, a scale for each tensor"}
USUAL = (_NVFP4,)


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`."""
    algorithm = section.text("quant_algo", "NVFP4").upper()
    if algorithm not in _RULES:
        raise section.error("quant_algo", f"{algorithm!r} is not supported; supported: {', '.join(_RULES)}")
    if algorithm == "NVFP4":
        section.only("group_size", _GROUP)
    excluded = section.names("ignore") or section.names("exclude_modules")
    unused = tuple(key for key in ("kv_cache_scheme", "kv_cache_quant_algo") if section.has(key))
    return StoredRules((_RULES[algorithm],), excluded, summary=_SUMMARIES[algorithm], unused=unused)
