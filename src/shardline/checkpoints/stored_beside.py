"""Files beside config.json that say how weights are quantized. Quantizers wrote them before config.json did."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardline.checkpoints.folder_files import read_json
from shardline.checkpoints.quantization import quantization_section
from shardline.checkpoints.wrapper import text_config
from shardline.models.hf_config import HFConfig

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
