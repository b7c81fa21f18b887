"""AutoRound (Intel): integers in the layout of GPTQ or AWQ, and modules with numbers of their own (`extra_config`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.checkpoints.stored import awq, gptq
from shardline.models.hf_config import HFConfig
from shardline.models.stored_weights import PackingRule, StoredRules

USUAL: tuple[PackingRule, ...] = ()
_USUAL_FORM = "auto_round:auto_gptq"
_PLAIN_KERNELS = ("", "exllamav2", "tritonv2", "triton")
"""What may follow "auto_round:" where no other library's layout is named."""
_REGEX_SIGNS = frozenset("*+?^$()[]{}|\\")
"""Signs that make a name in `extra_config` a regular expression, for those who read such files."""
_OWN_NUMBERS = ("bits", "group_size", "sym", "data_type", "act_bits")
_MAX_BITS = 8


def read(section: HFConfig) -> StoredRules:
    """See `stored_weights.Method`. A module with more than 8 bits is not quantized."""
    general, summary = _rule(section)
    excluded, named = list(section.names("modules_to_not_convert")), section.section("extra_config")
    rules: dict[tuple[Any, ...], tuple[PackingRule, list[str]]] = {}
    for name, own in named.values.items():
        if not isinstance(own, Mapping):
            raise named.error(name, f"must be an object, got {own!r:.80}")
        merged = HFConfig({**section.values, **own}, f"{named.section_name}{name}.")
        is_regex = bool(_REGEX_SIGNS & set(name))
        pattern = f"re:.*(?:{name})" if is_regex else name
        if merged.integer("bits") > _MAX_BITS:
            excluded.append(pattern)
            continue
        # There may be thousands of modules, with few different numbers.
        numbers = (is_regex, *(str(merged.values.get(key)) for key in _OWN_NUMBERS))
        if numbers not in rules:
            rules[numbers] = _rule(merged)[0], []
        rules[numbers][1].append(pattern)
    # A module's own name goes before a regular expression.
    ordered = [replace(rule, targets=tuple(names)) for _, (rule, names) in sorted(rules.items(), key=lambda r: r[0][0])]
    return StoredRules((*ordered, general), tuple(excluded), summary=summary)


def _rule(section: HFConfig) -> tuple[PackingRule, str]:
    """The rule for modules with the numbers in `section`, and a summary."""
    found = (awq if _is_awq(_form(section)) else gptq).read(_values(section))
    return _refused(found.rules[-1], section), found.summary


def _form(section: HFConfig) -> str:
    """What says how numbers are packed: a key that older versions called `backend`."""
    form = section.text("packing_format", section.text("backend", _USUAL_FORM)).lower()
    return _USUAL_FORM if form == "auto" else form


def _is_awq(form: str) -> bool:
    return "awq" in form


def _values(section: HFConfig) -> HFConfig:
    """The section in the terms of GPTQ or AWQ. Without their names, zero points are stored as they are."""
    as_they_are = "gptqmodel" in _form(section) or "gptq" not in _form(section)
    own = {"checkpoint_format": "gptq_v2" if as_they_are else "gptq", "desc_act": False, "dynamic": None}
    own = {"version": "gemm", "backend": None} if _is_awq(_form(section)) else own
    return HFConfig({**section.values, **own}, section.section_name)


def _refused(rule: PackingRule, section: HFConfig) -> PackingRule:
    """The rule, with a refusal if the checkpoint needs more than weights of integers."""
    form, kind, inputs = _form(section), section.text("data_type", "int"), section.integer("act_bits", 16, minimum=0)
    problem = ""
    library, _, kernel = form.partition(":")
    if not _is_awq(form) and "gptq" not in form and not (library == "auto_round" and kernel in _PLAIN_KERNELS):
        problem = f"auto-round's packing_format {form} is not supported, only those of GPTQ and AWQ"
    elif not kind.startswith("int"):
        problem = f"auto-round with data_type {kind} is not supported, only int"
    elif 0 < inputs <= _MAX_BITS:
        problem = f"auto-round with activations of {inputs} bits (act_bits) is not supported"
    elif section.has("rotation_config") or section.has("spinquant_config"):
        problem = "auto-round with rotations (rotation_config) is not supported"
    return replace(rule, layouts=(), refusal=problem) if problem else rule
