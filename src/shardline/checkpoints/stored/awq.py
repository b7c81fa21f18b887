"""AWQ: 4 bits, a float16 scale and a zero point for each group of neighbours along the input dim (Lin et al., 2023).

The layout is AutoAWQ's "gemm". A word has eight outputs of one input.
"""

from __future__ import annotations

from shardline.models.hf_config import HFConfig
from shardline.models.stored_layout import BlockLayout, Codes, Scales
from shardline.models.stored_weights import Packing, PackingRule, StoredRules

USUAL: tuple[PackingRule, ...] = ()
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`."""
    # AutoAWQ's own names of these keys are w_bit and q_group_size.
    bits = section.integer("bits", section.integer("w_bit", 4))
    group = max(0, section.integer("group_size", section.integer("q_group_size", 128, minimum=-1), minimum=-1))
    packing = Packing(f"int{bits}", bits, block_rows=1, block_columns=group, scale_bytes=2, zero_bits=bits)
    refusal = _refusal(section, bits)
    layout = BlockLayout(
        codes=Codes("qweight", "I32", 4, along="rows", transposed=True, order=_ORDER),
        scales=Scales("scales", block_columns=group, transposed=True),
        zeros=Codes("qzeros", "I32", 4, along="rows", transposed=True, order=_ORDER),
    )
    rule = PackingRule(packing, layouts=() if refusal else (layout,), refusal=refusal)
    groups = f"groups of {group}" if group else "one group a row"
    return StoredRules((rule,), section.names("modules_to_not_convert"), summary=f"{bits} bits in {groups}")


def _refusal(section: HFConfig, bits: int) -> str:
    # GPTQModel, which writes this layout too, has other names for the version.
    version = section.text("version", section.text("checkpoint_format", section.text("format", "gemm"))).lower()
    backend = section.text("backend", "autoawq").lower()
    if bits != 4:
        return f"awq with {bits} bits is not supported, only 4"
    if backend == "llm-awq":
        return "the layout of awq with backend llm-awq is not supported, only autoawq"
    if version != "gemm":
        return f"the layout of awq version {version} is not supported, only gemm"
    return ""
