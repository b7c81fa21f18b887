"""The fields of published rows: sizes, loads, lengths and formats, as people write them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shardline.checkpoints.quantization import usual_rules
from shardline.planner.catalog import find_model, shipped_facts, stored_as
from shardline.planner.memory import bits_label
from shardline.planner.planned_model import PlannedModel

_NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?)\s*([km])?\b", re.IGNORECASE)
_SCALE = {"": 1.0, "k": 1024.0, "m": 1024.0 * 1024.0}
_RANGE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:\.\.|-|to)\s*(\d+(?:\.\d+)?)")
_RATE = re.compile(r"qps|rps|req(?:uests?)?\s*(?:/|per\s*)s", re.IGNORECASE)
_PROMPT_GROUPS = re.compile(r"\d+P\s*[+/]\s*(\d+)D", re.IGNORECASE)
_EXPERT_GROUP = re.compile(r"DEP(\d+)(?: D)?$")
_REQUESTS = re.compile(r"(\d+) (?:prompts|requests)\b|prompts=(\d+)xC")
_UNEQUAL = re.compile(r"range_ratio|random lengths|(?:\+-|±)\s*\d+%")
_RANDOM_SHARE = 0.9
"""Mean of lengths that are drawn from 80% to 100% of the stated ones."""
_DEFAULT_LENGTH = 1024.0
"""Length of prompts or outputs where a row states none: that of most rows."""
_LABELS = {
    "fp16": "bf16",
    "float16": "bf16",
    "bfloat16": "bf16",
    "fp8_block": "fp8",
    "w8a8": "int8",
    "awq": "int4",
    "gptq": "int4",
    "w4a16": "int4",
}
"""Labels of weights for other names of formats with the same bytes and rates."""
_PATTERNS = {
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "fp4": "fp4",
    "fp8": "fp8|e4m3",
    "int4": r"int4|awq|gptq|w4a|4-?bit|\bq4",
    "int8": r"int8|w8a8|8-?bit|\bq8",
    "bf16": "b?f(?:loat)?p?16|half|16-?bit|fp32",
}
"""Formats by a pattern that their names contain; the first that is found."""
_VARIANTS = (
    "instruct", "chat", "it", "hf", "meta", "thinking", "base", "quantized", "dynamic", "block", "static", "kv", "fp8",
    "fp4", "nvfp4", "mxfp4", "bf16", "fp16", "int4", "int8", "awq", "gptq", "w4a16", "w8a8", "[0-9]{4}", r"v0\.[0-9]+",
)  # fmt: skip
"""Parts of a model's name that change neither sizes nor layers, as patterns."""


class Sizes(NamedTuple):
    """The sizes of the axes that a row states."""

    tensor: int
    pipeline: int
    data: int
    """Replicas that decode."""
    experts: int
    """Ranks over which whole experts are spread; 1: none."""
    has_prompt_groups: bool
    """Whether other replicas compute the prompts."""


class RowLoad(NamedTuple):
    """Requests at once, over all replicas, or requests per second; neither: as many run as fit."""

    running: float | None
    rate: float | None


def number(text: str | None) -> float | None:
    """The first number of a text such as "1,024", "8k" or "64 per GPU"; None: it has none."""
    match = _NUMBER.search(text or "")
    if match is None:
        return None
    return float(match.group(1).replace(",", "")) * _SCALE[(match.group(2) or "").lower()]


def sizes(one: Mapping[str, str]) -> Sizes:
    """The sizes of a row. Without a tensor-parallel size, the other axes must say how many GPUs are left for it.

    Raises:
        ValueError: the row names no layout.
    """
    data_text, expert_text = one.get("dp") or "", one.get("ep") or ""
    groups = _PROMPT_GROUPS.search(data_text) or _PROMPT_GROUPS.search(expert_text)
    spread = _EXPERT_GROUP.search(data_text)
    pipeline = _size(one, "pp")
    if spread is not None:
        ranks = int(spread.group(1))
        return Sizes(1, pipeline, ranks, ranks, has_prompt_groups=" P" in data_text)
    if groups is not None:
        stated = int(groups.group(1))
        if groups.re.search(data_text):
            return Sizes(_size(one, "tp"), pipeline, stated, _size(one, "ep"), has_prompt_groups=True)
        # Groups of ranks for experts: attention in replicas of one GPU.
        return Sizes(1, pipeline, stated, stated, has_prompt_groups=True)
    data, experts = _size(one, "dp"), _size(one, "ep")
    if number(one.get("tp")):
        return Sizes(_size(one, "tp"), pipeline, data, experts, has_prompt_groups=False)
    gpus = int(number(one.get("n_gpus")) or 0)
    if gpus == 1:
        return Sizes(1, 1, 1, 1, has_prompt_groups=False)
    if data > 1:
        return Sizes(max(1, gpus // (pipeline * data)), pipeline, data, experts, has_prompt_groups=False)
    if experts > 1:
        return Sizes(1, pipeline, experts, experts, has_prompt_groups=False)
    raise ValueError("no tensor-parallel size")


def _size(one: Mapping[str, str], axis: str) -> int:
    """The size of an axis; 1 if the row does not state it."""
    return max(1, int(number(one.get(axis)) or 1))


def load(one: Mapping[str, str]) -> RowLoad:
    """The load of a row. A ramp of rates stands for their mean."""
    text, kind = one.get("concurrency_or_rate") or "", one.get("load_type") or ""
    if "single-request" in kind:
        return RowLoad(1.0, None)
    value = number(text)
    if _RATE.search(text) or _RATE.search(kind):
        bounds = _RANGE.search(kind) or _RANGE.search(text)
        if bounds is not None:
            value = (float(bounds.group(1)) + float(bounds.group(2))) / 2
        return RowLoad(None, value or number(kind))
    if value and re.search(r"per[ _-]?gpu", text, re.IGNORECASE):
        value *= number(one.get("n_gpus")) or 1.0
    return RowLoad(value or None, None)


def lengths(one: Mapping[str, str]) -> tuple[float, float]:
    """Mean tokens of (prompts, outputs)."""
    share = _RANDOM_SHARE if "range_ratio 0.8" in (one.get("notes") or "") else 1.0
    is_prefill = "prefill only" in (one.get("load_type") or "")
    outputs = number(one.get("osl")) or (1.0 if is_prefill else _DEFAULT_LENGTH)
    return share * (number(one.get("isl")) or _DEFAULT_LENGTH), max(1.0, share * outputs)


def has_equal_lengths(one: Mapping[str, str]) -> bool:
    """Whether nothing says that lengths vary."""
    return _UNEQUAL.search(one.get("notes") or "") is None


def num_rounds(one: Mapping[str, str], running: float | None) -> float | None:
    """Requests of the run for each that runs at once; None: the row does not say how many there are."""
    match = _REQUESTS.search(one.get("notes") or "")
    if match is None:
        return None
    if match.group(2):
        return float(match.group(2))
    return float(match.group(1)) / running if running else None


def published_model(text: str) -> PlannedModel:
    """The model that a row names. Names without their organization, or of another checkpoint of one model, are known.

    Raises:
        ValueError: no known model has such a name.
    """
    found = _published_model(text)
    if isinstance(found, str):
        raise ValueError(found)
    return found


@functools.cache
def _published_model(text: str) -> PlannedModel | str:
    """See `published_model`; a refusal is text, so that the hub is asked once for each name."""
    name = text.split(" ")[0] if "/" in text else text.split(" (")[0].strip()
    facts = shipped_facts()
    known = {one.lower() for one in (*facts["aliases"], *facts["models"])}
    near = None if name.lower() in known or Path(name).exists() else _near(text)
    try:
        model = find_model(near or name)
    except ValueError as error:
        return str(error)
    wanted = _format_in(text.lower())
    if near and wanted in usual_rules() and wanted != bits_label(model):
        return stored_as(model, usual_rules()[wanted])
    return model


def _near(text: str) -> str | None:
    """The known model whose name differs only in its organization, and in parts that change no sizes."""
    facts = shipped_facts()
    known = sorted((*facts["aliases"], *facts["models"]), key=len, reverse=True)
    return {_plain(one): one for one in known}.get(_plain(text))


def _plain(name: str) -> str:
    short = "-" + re.sub(r"\s*\(.*", "", name.lower().rsplit("/", 1)[-1]).replace("_", "-").replace(" ", "-")
    words = "|".join(_VARIANTS)
    while (shorter := re.sub(rf"[-_ .](?:{words})(?![a-z0-9])", "", short)) != short:
        short = shorter
    return short.strip("-").replace("-", "")


def _format_in(text: str) -> str:
    """The format that a text names; empty: none."""
    found = _first_format(text)
    return found if found in usual_rules() else f"nv{found}" if f"nv{found}" in usual_rules() else ""


def _first_format(text: str) -> str:
    return next((label for label, pattern in _PATTERNS.items() if re.search(pattern, text)), "")


def read_label(model: PlannedModel, precision: str) -> str:
    """The label of the weights for a row's precision: "fp4" means the 4-bit floats that the model is published in.

    Raises:
        ValueError: the precision names no format.
    """
    own = bits_label(model)
    wanted = precision.split("/")[0].split(",")[0].strip().lower()
    wanted = _LABELS.get(wanted, wanted)
    if not wanted or "native" in wanted or wanted == own:
        return own
    if wanted != "bf16" and wanted not in usual_rules():
        wanted = _first_format(wanted) or wanted
    if wanted == "bf16":
        return wanted
    if wanted == "fp4":
        return own if own.endswith("fp4") else "nvfp4"
    if own.endswith("fp4"):
        # The model exists in its own 4 bits only, and the row names the format of the arithmetic.
        return own
    if wanted not in usual_rules():
        raise ValueError(f"unknown precision {precision!r}")
    return wanted


def kv_label(precision: str) -> str:
    """The format of the KV cache that a row's precision states; "auto": none."""
    return "fp8" if re.search(r"kv[-_ ]?(?:cache)?[-_ ]?fp8|fp8[-_ ]?kv", precision.lower()) else "auto"


def plain_gpu(text: str) -> str:
    """The name of a GPU without its number and remarks: "8xH100/H200 (not stated)" is H100."""
    name = re.split(r"[/(,]", text)[0].strip()
    return re.sub(r"^\d+\s*x\s*|(?<=\d)\s*x\s*\d+$", "", name, flags=re.IGNORECASE)


def output_rate(one: Mapping[str, str], num_gpus: int) -> float | None:
    """Output tokens per second on `num_gpus`; if only all tokens are stated, the share of the outputs."""
    inputs, outputs = number(one.get("isl")), number(one.get("osl"))
    if rate := _plain_number(one.get("output_tok_s")):
        return rate
    if rate := _plain_number(one.get("output_tok_s_per_gpu")):
        return rate * num_gpus
    total = _plain_number(one.get("total_tok_s"))
    if total and inputs and outputs and outputs > 1:
        return total * outputs / (inputs + outputs)
    return None


def first_token(one: Mapping[str, str]) -> float | None:
    """Seconds to the first token; of a prompt alone, its tokens divided by its rate."""
    inputs, total = number(one.get("isl")), _plain_number(one.get("total_tok_s"))
    if "single-request prefill" in (one.get("load_type") or "") and inputs and total:
        return inputs / total
    return milliseconds(one.get("ttft_ms"))


def milliseconds(text: str | None) -> float | None:
    """A time in seconds; None: not stated."""
    value = _plain_number(text)
    return value / 1000 if value else None


def _plain_number(text: str | None) -> float | None:
    """A measured value; None: none, or no number above zero."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
