"""The checkpoint as OpenVINO's IR: `openvino_convert.py FOLDER PRECISION` writes it once and prints its path.

optimum-intel exports it. bf16 weights stay unchanged, and nncf makes int8 weights (int8_asym, a scale per row).
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from protocol import converted_folder, refuse_other_than


def ir_folder(folder: str, precision: str) -> Path:
    """The folder of this precision."""
    return converted_folder(folder, f"openvino-{precision}")


def export(folder: str, precision: str, target: Path) -> None:
    """Write the IR and the configuration."""
    import torch
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    quantization = OVWeightQuantizationConfig(bits=8, sym=False) if precision == "int8" else None
    model = OVModelForCausalLM.from_pretrained(
        folder,
        export=True,
        compile=False,
        load_in_8bit=False,
        torch_dtype=torch.bfloat16,
        quantization_config=quantization,
    )
    model.save_pretrained(target)
    # GenAI reads a missing end-of-sequence token as -1 and refuses it. Requests ignore this token anyway.
    for name in ("config.json", "generation_config.json"):
        path = target / name
        if path.exists():
            config = json.loads(path.read_text())
            config["eos_token_id"] = config.get("eos_token_id") or 1
            path.write_text(json.dumps(config, indent=2))


def main() -> None:
    """Write the missing files; print the folder."""
    folder, precision = sys.argv[1:3]
    refuse_other_than(precision, ["bf16", "int8"])
    target = ir_folder(folder, precision)
    if not target.exists():
        unfinished = target.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        export(folder, precision, unfinished)
        unfinished.rename(target)
    print(target)


if __name__ == "__main__":
    main()
