"""How the files of a model say that weights are stored. A `quant_method` has the file of its name in `stored/`."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

import shardline.checkpoints.stored
from shardline.checkpoints.folder_files import read_json
from shardline.checkpoints.wrapper import text_config
from shardline.models.hf_config import HFConfig
from shardline.models.stored_weights import _NUMBERED_LAYER, PackingRule, StoredRules

_WITH_DASHES = ("auto_round", "compressed_tensors")
"""Methods whose names have a dash, in spite of what some files say."""


_TELLING_KEYS = {
    "quant_algo": "modelopt",
    "config_groups": "compressed-tensors",
    "bnb_4bit_quant_type": "bitsandbytes",
    "load_in_4bit": "bitsandbytes",
    "load_in_8bit": "bitsandbytes",
    "w_bit": "awq",
    "desc_act": "gptq",
    "damp_percent": "gptq",
}
"""Keys that only one method has; ModelOpt's sections may have `config_groups` too."""


_CUT_LIST = re.compile(r"\.\.\. \d+ entries in all")


class Method(Protocol):
    """The module of a `quant_method`."""

    USUAL: tuple[PackingRule, ...]
    """How published checkpoints of this kind usually are; one rule for each label that the method brings."""

    def read(self, section: HFConfig) -> StoredRules:
        """What a `quantization_config` with this method says.

        Raises:
            ValueError: it describes something that this file does not know.
        """


@functools.cache
def methods() -> dict[str, Method]:
    """Every known way of storing weights, by its file's name: the `quant_method` with underscores."""
    names = sorted(module.name for module in pkgutil.iter_modules(shardline.checkpoints.stored.__path__))
    return {name: cast(Method, importlib.import_module(f"shardline.checkpoints.stored.{name}")) for name in names}


def usual_rules() -> dict[str, StoredRules]:
    """For each label, how checkpoints with this label usually are stored."""
    return {rule.packing.label: StoredRules((rule,)) for method in methods().values() for rule in method.USUAL}


def read_stored(config: HFConfig) -> StoredRules:
    """How a config.json says that weights are stored.

    Raises:
        ValueError: the `quant_method` is unknown, or its section is wrong.
    """
    section = quantization_section(config)
    if section is None:
        return StoredRules()
    known = methods()
    method = section.text("quant_method", _method_by_keys(section))
    # Old versions of AutoRound call themselves intel/auto-round.
    name = method.lower().replace("-", "_").rpartition("/")[2]
    if name not in known:
        raise section.error("quant_method", f"{method!r} is not known; known: {', '.join(map(_spelled, known))}")
    method = _spelled(name)
    rules = _with_small_experts(config, known[name].read(section))
    for pattern in (*rules.excluded, *(target for rule in rules.rules for target in rule.targets)):
        _check_pattern(section, pattern)
    return msgspec.structs.replace(
        rules, excluded=_complete(rules.excluded), method=method, summary=f"{method}, {rules.summary}"
    )


def _spelled(name: str) -> str:
    """The `quant_method` of a file in `stored/`."""
    return name.replace("_", "-") if name in _WITH_DASHES else name


def _method_by_keys(section: HFConfig) -> str:
    """The `quant_method` of a section that does not name one, as some old versions wrote it."""
    return next((method for key, method in _TELLING_KEYS.items() if section.has(key)), "unknown")


def _with_small_experts(config: HFConfig, rules: StoredRules) -> StoredRules:
    """The rules, and one for experts that are in MXFP4 by a key beside the section (DeepSeek-V4)."""
    if config.text("expert_dtype", "") != "fp4" or any(rule.only_experts for rule in rules.rules):
        return rules
    refusal = "experts in MXFP4 beside other weights in fp8 are not supported"
    usual = methods()["mxfp4"].USUAL[0]
    experts = msgspec.structs.replace(usual, layouts=(), refusal=refusal)
    return msgspec.structs.replace(rules, rules=(experts, *rules.rules), summary=f"{rules.summary}; experts in MXFP4")


def quantization_section(config: HFConfig) -> HFConfig | None:
    """The section of a config.json about quantization; None: there is none, so nothing is quantized."""
    # Early versions of compressed-tensors have another key.
    for key in ("quantization_config", "compression_config"):
        if config.has(key) and config.section(key).values:
            return config.section(key)
    return None


def check_loadable(config: HFConfig) -> None:
    """Refuse a checkpoint whose quantized weights the engine does not load.

    Raises:
        ValueError: its config.json says so. The message says what would work.
    """
    refused = next((rule for rule in read_stored(config).rules if not rule.layouts), None)
    if refused is not None:
        section = quantization_section(config)
        assert section is not None
        why = refused.refusal or f"{refused.packing.label} weights are not supported"
        raise section.error("quant_method", f"{why}; use the unquantized checkpoint, with --quantization if need be")


def _check_pattern(section: HFConfig, pattern: str) -> None:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise section.error("ignore", f"has {pattern!r}, which is no regular expression: {error}") from None


def _complete(excluded: Sequence[str]) -> tuple[str, ...]:
    """The patterns. If the list was cut, what it says about several layers holds for all of them."""
    if not any(_CUT_LIST.search(one) for one in excluded):
        return tuple(excluded)
    listed = [one for one in excluded if not _CUT_LIST.search(one)]
    layers: dict[str, set[str]] = {}
    for one in listed:
        if found := _NUMBERED_LAYER.search(one):
            layers.setdefault(_NUMBERED_LAYER.sub("layers.*", one), set()).add(found.group(1))
    return (*listed, *(general for general, numbers in layers.items() if len(numbers) > 1))


BESIDE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Names of AutoGPTQ's, AutoAWQ's and ModelOpt's file."""


def with_quantization(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config.json of `folder`, with a `quantization_config` from a file beside it if it has none.

    Raises:
        ValueError: the file is broken.
    """
    if quantization_section(HFConfig(text_config(config))) is not None:
        return config
    file = next((file for name in BESIDE if (file := folder / name).is_file()), None)
    if file is None:
        return config
    values = read_json(file)
    # ModelOpt's file has the name of the producer around it.
    inner = values.get("quantization")
    return {**config, "quantization_config": dict(inner) if isinstance(inner, Mapping) else values}
