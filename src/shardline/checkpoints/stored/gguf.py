"""GGUF: blocks of 32 or 256 neighbours along a row, with scales in front. A file may mix types; one is named here."""

from __future__ import annotations

from shardline.models.hf_config import HFConfig
from shardline.models.stored_layout import Form, GGUFLayout
from shardline.models.stored_weights import Packing, PackingRule, StoredRules


def _rule(name: str, bits: int, columns: int, scale_bytes: int, form: GGUFLayout) -> PackingRule:
    packing = Packing(name, bits, block_rows=1, block_columns=columns, scale_bytes=scale_bytes)
    return PackingRule(packing, layouts=(form,))


_RULES = {
    "Q4_0": _rule("q4_0", 4, 32, 2, GGUFLayout(4, 32, 2)),
    "Q4_1": _rule("q4_1", 4, 32, 4, GGUFLayout(4, 32, 6)),
    "Q5_0": _rule("q5_0", 5, 32, 2, GGUFLayout(6, 32, 2)),
    "Q5_1": _rule("q5_1", 5, 32, 4, GGUFLayout(6, 32, 6)),
    "Q8_0": _rule("q8_0", 8, 32, 2, GGUFLayout(8, 32, 2)),
    "Q4_K": _rule("q4_k", 4, 256, 16, GGUFLayout(4, 32, 2.5)),
    "Q5_K": _rule("q5_k", 5, 256, 16, GGUFLayout(6, 32, 2.5)),
    "Q6_K": _rule("q6_k", 6, 256, 18, GGUFLayout(6, 16, 1.125)),
    "MXFP4": _rule("mxfp4", 4, 32, 1, GGUFLayout(4, 32, 4)),
}
"""The bytes of each type, in the file and in memory."""
USUAL: tuple[PackingRule, ...] = ()


def form_of(name: str) -> Form | None:
    """What a weight of the type `name` needs if it stays packed; None: the type is not packed."""
    rule = _RULES.get(name)
    return None if rule is None else rule.layouts[0].form


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`. The section is made from the file's header."""
    name = section.text("type")
    if name not in _RULES:
        raise section.error("type", f"{name!r} is not supported; supported: {', '.join(_RULES)}")
    return StoredRules((_RULES[name],), summary=section.text("summary", name))
