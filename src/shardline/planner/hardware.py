"""The GPUs that the planner knows: `hardware.toml`, and files of the same form from the user."""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

GIB = 1 << 30
GB = 1e9
_PLAIN = ("bf16", "fp16", "fp32")
"""Formats in which every device computes, if only at the rate of bf16."""
_WORDS = ("nvidia", "amd", "tesla", "geforce", "instinct", "oam", "edition", "gpu")
"""Parts of a name that say nothing more."""
_MEMORY = re.compile(r"(\d+)(?:g|gb|gib)")
_MEMORY_ERROR = 0.12
"""Share by which a name's memory may differ from the entry's: marketing rounds it."""
_NAMED = 4
"""Names in the message about an unknown GPU."""


class GpuLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the GPUs of a node are connected. Rates are GB/s (1e9 bytes) of one direction."""

    kind: str
    """nvlink, xgmi or pcie."""
    gbs: float
    """What a GPU sends to all others together."""
    pair_gbs: float
    """What it sends to one other GPU."""
    domain: int
    """Number of GPUs that the link joins."""


class GpuPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """US dollars for an hour of one GPU."""

    low: float
    """Spot or long rental."""
    high: float
    """On demand."""
    date: str
    source: str


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of GPU. See the head of hardware.toml for the units."""

    vendor: str
    architecture: str
    capability: str
    memory_gb: float
    usable_gib: float
    bandwidth_gbs: float
    tflops: dict[str, float]
    link: GpuLink
    pcie_gbs: float
    network_gbs: float
    source: str
    power_watts: float = 0.0
    bridge_gbs: float = 0.0
    price: GpuPrice | None = None
    note: str = ""
    network: str = ""
    name: str = ""
    storage_gbs: float = 0.0
    """What it reads of weights that are on a disk; 0: unknown."""

    @property
    def usable_bytes(self) -> int:
        """Memory that a process sees, in bytes."""
        return int(self.usable_gib * GIB)

    def flops_per_second(self, label: str) -> float:
        """Dense operations per second of products with weights that are stored in the format `label`.

        Weights in a format without a rate are expanded to 16 bits for each product.
        """
        return self.tflops.get(self._computed(label), self.tflops["bf16"]) * 1e12

    def computes(self, label: str) -> bool:
        """Whether products with weights in the format `label` need no expansion of the weights to 16 bits."""
        return self._computed(label) in (*self.tflops, *_PLAIN)

    def _computed(self, label: str) -> str:
        """The format in which products with such weights are computed, if the GPU has it."""
        if label == "nvfp4":
            return "fp4"
        if label == "mxfp4" and "fp4" in self.tflops:
            return "fp8"  # activations have 8 bits
        return label


@functools.cache
def known_gpus(overrides: Path | None = None) -> Mapping[str, Gpu]:
    """All GPUs by name: the shipped ones, and those of the TOML file `overrides`, which replace shipped ones.

    Raises:
        ValueError: the file cannot be read, or an entry of it is wrong.
    """
    gpus = _parse(Path(__file__).with_name("hardware.toml"))
    return gpus if overrides is None else {**gpus, **_parse(overrides)}


def _parse(path: Path) -> dict[str, Gpu]:
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return {name: msgspec.convert({**table, "name": name}, Gpu, strict=False) for name, table in tables.items()}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def find_gpu(name: str, gpus: Mapping[str, Gpu], link: str | None = None) -> Gpu:
    """The GPU that `name` means. A name may leave parts out, such as "H100" or "h100_sxm".

    The vendor and the kind of memory, as in "NVIDIA H100 80GB HBM3", say nothing more. A size selects by memory.

    Of several candidates, the first is taken whose own link is `link`; without a link, the first of all.

    Raises:
        ValueError: there is none. The message names the nearest.
    """
    wanted = [token for token in _tokens(name) if token not in _WORDS and not token.startswith("hbm")]
    matches = [gpu for gpu in gpus.values() if wanted and all(_has(gpu, token) for token in wanted)]
    exact = [gpu for gpu in matches if _tokens(gpu.name) == wanted]
    if exact:
        return exact[0]
    if not matches:
        # Most people write the beginning of a name only.
        by_name = {short: known for known in reversed(list(gpus)) for short in (known.lower(), _tokens(known)[0])}
        near = difflib.get_close_matches(name.lower(), by_name, n=_NAMED, cutoff=0.3)
        close = list(dict.fromkeys(by_name[known] for known in near)) or list(gpus)[:_NAMED]
        raise ValueError(f"unknown GPU {name!r}; the nearest are {', '.join(close)}")
    return next((gpu for gpu in matches if gpu.link.kind == link), matches[0])


def _tokens(name: str) -> list[str]:
    """The parts of a name: "rtx4090" has two, like "RTX-4090"."""
    return [token for token in re.split(r"[-_ ]+", re.sub(r"\brtx(?=\d)", "rtx-", name.lower())) if token]


def _has(gpu: Gpu, token: str) -> bool:
    """Whether a part of the GPU's name is the token, or its memory.

    A token of letters may also be the beginning of a part: "sxm" means SXM5.
    """
    if any(part == token or (token.isalpha() and part.startswith(token)) for part in _tokens(gpu.name)):
        return True
    memory = _MEMORY.fullmatch(token)
    return memory is not None and abs(int(memory.group(1)) / gpu.memory_gb - 1) < _MEMORY_ERROR
