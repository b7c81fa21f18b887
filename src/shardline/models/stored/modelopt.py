"""NVIDIA's ModelOpt: NVFP4 (4 bits, an e4m3 scale for 16 neighbours, a float32 scale for the tensor), or e4m3."""

from __future__ import annotations

from shardline.models.hf_config import HFConfig
from shardline.models.stored_weights import Packing, PackingRule, StoredRules, label_of

_NVFP4 = Packing("nvfp4", 4, block_rows=1, block_columns=16, scale_bytes=1, tensor_bytes=8)
_PER_TENSOR = Packing(label_of("float", 8), 8, tensor_bytes=8)
USUAL = (PackingRule(_NVFP4),)


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`."""
    algorithm = section.text("quant_algo", "NVFP4").upper()
    excluded = section.names("ignore") or section.names("exclude_modules")
    if algorithm not in ("NVFP4", "FP8"):
        raise section.error("quant_algo", f"{algorithm!r} is not known; known: NVFP4, FP8")
    packing = _NVFP4 if algorithm == "NVFP4" else _PER_TENSOR
    refusal = f"modelopt's {algorithm} is not supported"
    return StoredRules((PackingRule(packing, refusal=refusal),), excluded, summary=algorithm)
