"""What each generation of GPUs computes (`generations.toml`), and the refusal of what one does not."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from shardline.deployment.deployment import KernelsName
from shardline.deployment.machine import Device


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the head of generations.toml."""

    name: str
    native: tuple[str, ...]
    source: str
    unpacked: tuple[str, ...] = ()
    shared_kib: int = 0
    holds_all_stages: bool = False
    launches_early: bool = False
    most_stages: int = 16

    def __str__(self) -> str:
        """For people."""
        text = f"{self.name}: computes in {', '.join(self.native)}"
        return text + (f"; unpacks {', '.join(self.unpacked)} with --kernels torch" if self.unpacked else "")


@functools.cache
def generations() -> Mapping[str, Generation]:
    """All of them by architecture, or by kind of device."""
    text = Path(__file__).with_name("generations.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Generation])


def generation_of(device: Device) -> Generation | None:
    """A device's generation; None: nothing is known about it, as about CPUs, whose kernels compute in all formats.

    An architecture that is not in the table counts as the nearest earlier one of the same vendor: the formats of
    tensor cores have only grown.
    """
    if device.kind != "cuda":
        return generations().get(device.kind)
    vendor, number = _parts(device.capability)
    earlier = [name for name in generations() if (own := _parts(name))[0] == vendor and own[1] <= number]
    return generations()[max(earlier, key=_parts)] if vendor and earlier else None


def check_format(what: str, wanted: str, devices: Iterable[Device], kernels: KernelsName, alternatives: str) -> None:
    """Refuse devices that do not compute in a format. `what`: the option in words; `alternatives`: what to use instead.

    Raises:
        ValueError: the message names the device, what would be needed, and what would work.
    """
    for device in devices:
        known = generation_of(device)
        if known is None or wanted in known.native or (kernels == "torch" and wanted in known.unpacked):
            continue
        here = f"{device.name} is {device.capability}" if device.capability else f"{device.name} does not"
        fix = f"use {alternatives}"
        if wanted in known.unpacked:
            fix += ", or serve it with --kernels torch, which makes it wider for each product"
        first = min((name for name in generations() if _serves(name, device, wanted)), key=_parts, default="")
        needs = "a device that computes in it" if not first else f"a GPU that computes in it ({first} or later)"
        raise ValueError(f"{what} needs {needs}, and {here}; {fix}")


def _serves(name: str, device: Device, wanted: str) -> bool:
    """Whether the generation `name` is of the device's vendor and computes in a format."""
    vendor, _ = _parts(name)
    return bool(vendor) and vendor == _parts(device.capability)[0] and wanted in generations()[name].native


def _parts(capability: str) -> tuple[str, int]:
    """The line of GPUs and the number in it, whose last digits AMD writes in hexadecimal; ("", 0): neither."""
    match = re.fullmatch(r"sm_(\d+)a?|gfx(\d+)([0-9a-f]{2})", capability)
    if match is None:
        return "", 0
    if match[1]:
        return "sm", int(match[1])
    return "gfx9" if match[2] == "9" else "gfx1", int(match[2]) * 0x100 + int(match[3], 16)
