"""What the user asked for with `--watermark-config`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardline.watermark import SCHEMES, Scheme

if TYPE_CHECKING:
    from shardline.watermark.keys import WatermarkKey

_KEYS = ("scheme", "key_file")
_EXAMPLE = '{"scheme": "kgw", "key_file": "key.json"}'


@dataclass(frozen=True)
class WatermarkConfig:
    """How answers are marked."""

    scheme: Scheme
    key_file: str

    def load_key(self) -> WatermarkKey:
        """The key in the file.

        Raises:
            ValueError: it cannot be read, or is of another scheme.
        """
        from shardline.watermark.keys import read_key, scheme_of

        key = read_key(self.key_file)
        if scheme_of(key) != self.scheme:
            raise ValueError(
                f"the watermark key {self.key_file} is of the scheme {scheme_of(key)}, and watermark_config says "
                f"{self.scheme}"
            )
        return key


def parse_watermark(text: str | None) -> WatermarkConfig | None:
    """Read the option; the key file is not opened. None: answers have no mark.

    Raises:
        ValueError: it is no JSON object, or has other keys or values.
    """
    if text is None:
        return None
    try:
        fields: Any = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"watermark_config must be a JSON object like {_EXAMPLE}, got {text!r}")
    if unknown := [name for name in fields if name not in _KEYS]:
        raise ValueError(f"watermark_config has the unknown key {unknown[0]!r}; known: {', '.join(_KEYS)}")
    scheme, key_file = fields.get("scheme"), fields.get("key_file")
    if scheme not in SCHEMES:
        raise ValueError(f"scheme of watermark_config must be {' or '.join(SCHEMES)}, got {scheme!r}")
    if not isinstance(key_file, str) or not key_file:
        raise ValueError(
            f"key_file of watermark_config must name a file, which `shardline watermark key` makes: {_EXAMPLE}"
        )
    return WatermarkConfig(scheme, key_file)
