"""GGUF: blocks of 32 or 256 neighbours along a row, with scales in front. A file may mix types; one is named here."""

from __future__ import annotations

from shardline.models.hf_config import HFConfig
from shardline.models.stored_layout import GGUFLayout
from shardline.models.stored_weights import Packing, PackingRule, StoredRules


def _packing(name: str, bits: int, columns: int, scale_bytes: int) -> Packing:
    return Packing(name, bits, block_rows=1, block_columns=columns, scale_bytes=scale_bytes)


_PACKINGS = {
    "Q4_0": _packing("q4_0", 4, 32, 2),
    "Q4_1": _packing("q4_1", 4, 32, 4),
    "Q5_0": _packing("q5_0", 5, 32, 2),
    "Q5_1": _packing("q5_1", 5, 32, 4),
    "Q8_0": _packing("q8_0", 8, 32, 2),
    "Q4_K": _packing("q4_k", 4, 256, 16),
    "Q5_K": _packing("q5_k", 5, 256, 16),
    "Q6_K": _packing("q6_k", 6, 256, 18),
    "MXFP4": _packing("mxfp4", 4, 32, 1),
}
"""The bytes of each type."""
USUAL: tuple[PackingRule, ...] = ()


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`. The section is made from the file's header."""
    name = section.text("type")
    if name not in _PACKINGS:
        raise section.error("type", f"{name!r} is not supported; supported: {', '.join(_PACKINGS)}")
    return StoredRules((PackingRule(_PACKINGS[name], layouts=(GGUFLayout(),)),), summary=section.text("summary", name))
