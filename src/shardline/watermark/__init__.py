"""Watermarks of generated text: their keys, the secret choices that a key makes, and the detector; no torch."""

from __future__ import annotations

from typing import Literal

Scheme = Literal["kgw", "synthid"]
SCHEMES: tuple[Scheme, ...] = ("kgw", "synthid")
