"""The checkpoint as llama.cpp's GGUF: `llama_cpp_convert.py FOLDER PRECISION` writes it once and prints its path.

Qwen2 architecture, no tokenizer (token ids go in and out). Written in bf16 from the safetensors, then quantized by
llama.cpp itself: int8 is Q8_0, int4 is Q4_0.
"""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp
from protocol import converted_folder, refuse_other_than
from qwen2_gguf import write_bf16

_QUANTIZED = {"int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}


def gguf_path(folder: str, precision: str) -> Path:
    """The file of this precision."""
    return converted_folder(folder, "gguf") / f"{precision}.gguf"


def main() -> None:
    """Write the missing files; print the path."""
    folder, precision = sys.argv[1:3]
    refuse_other_than(precision, ["bf16", *_QUANTIZED])
    path, bf16 = gguf_path(folder, precision), gguf_path(folder, "bf16")
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    if not bf16.exists():
        write_bf16(Path(folder), unfinished)
        unfinished.rename(bf16)
    if not path.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = _QUANTIZED[precision]
        if llama_cpp.llama_model_quantize(str(bf16).encode(), str(unfinished).encode(), params) != 0:
            raise SystemExit(f"llama.cpp could not quantize {bf16}")
        unfinished.rename(path)
    print(path)


if __name__ == "__main__":
    main()
