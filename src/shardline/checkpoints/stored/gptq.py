"""GPTQ: 2 to 8 bits, a float16 scale and a zero point for each group, and each column's group as an int32.

The layout is AutoGPTQ's (Frantar et al., 2022). A word has neighbours along the input dim, or zero points of
neighbouring outputs. With `desc_act`, the columns of a group need not be neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardline.models.hf_config import HFConfig
from shardline.models.stored_layout import BlockLayout, Codes, Scales
from shardline.models.stored_weights import Packing, PackingRule, StoredRules

USUAL: tuple[PackingRule, ...] = ()
_LOADED_BITS = (4, 8)


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`. GPTQModel's `dynamic` gives modules other numbers, or excludes them."""
    rules, excluded = [], list(section.names("modules_to_not_convert"))
    dynamic = section.section("dynamic")
    for pattern, own in dynamic.values.items():
        regex = f"re:{pattern.removeprefix('+:').removeprefix('-:')}"
        if pattern.startswith("-:"):
            excluded.append(regex)
        elif not isinstance(own, Mapping):
            raise dynamic.error(pattern, f"must be an object, got {own!r:.80}")
        else:
            merged = HFConfig({**section.values, **own}, section.section_name)
            rules.append(_rule(merged, (regex,)))
    rules.append(_rule(section, ("Linear",)))
    bits, group = section.integer("bits"), section.integer("group_size", minimum=-1)
    order = ", desc_act" if section.flag("desc_act", False) else ""
    groups = f"groups of {group}" if group > 0 else "one group a row"
    return StoredRules(tuple(rules), tuple(excluded), summary=f"{bits} bits in {groups}{order}")


def _rule(section: HFConfig, targets: tuple[str, ...]) -> PackingRule:
    bits, group = section.integer("bits"), max(0, section.integer("group_size", minimum=-1))
    packing = Packing(
        f"int{bits}", bits, block_rows=1, block_columns=group, scale_bytes=2, zero_bits=bits, column_bytes=4
    )
    checkpoint_format = section.text("checkpoint_format", section.text("format", "gptq"))
    if section.flag("is_marlin_format", False):
        checkpoint_format = "marlin"
    if bits not in _LOADED_BITS:
        return PackingRule(packing, targets, refusal=f"gptq with {bits} bits is not supported, only 4 and 8")
    if checkpoint_format not in ("gptq", "gptq_v2"):
        return PackingRule(packing, targets, refusal=f"gptq's checkpoint_format {checkpoint_format} is not supported")
    layout = BlockLayout(
        codes=Codes("qweight", "I32", bits, transposed=True),
        scales=Scales("scales", block_columns=group, transposed=True),
        zeros=Codes(
            "qzeros",
            "I32",
            bits,
            along="rows",
            transposed=True,
            offset=1 if checkpoint_format == "gptq" else 0,
        ),
        group_index="g_idx",
        ordered=not section.flag("desc_act", False),
    )
    return PackingRule(packing, targets, layouts=(layout,))
