"""Tiny checkpoints in the formats that people download: an axis of the exactness matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.models.checkpoints import make_checkpoint

_LLAMA: dict[str, Any] = {"num_hidden_layers": 3, "intermediate_size": 96}
_BLOCKS: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 256}
"""Rows of K-blocks have a multiple of 256 columns."""
_GPT_OSS: dict[str, Any] = {"num_hidden_layers": 3, "intermediate_size": 64, "sliding_window": 24}

Write = Callable[[Path, Path], None]
"""Writes the checkpoint in the first folder to the second path, in its format."""


class Stored(NamedTuple):
    """A checkpoint in a format."""

    family: str
    options: dict[str, Any]
    write: Write
    suffix: str = ""
    quantization: str | None = None
    """What a user asks for."""

    def make(self, folder: Path) -> Path:
        """Write it to `folder`; returns what a user would serve."""
        target = folder / f"model{self.suffix}"
        if not target.exists():
            self.write(make_checkpoint(self.family, folder / "source", **self.options), target)
        return target


def _gguf(family: str, *names: str) -> Stored:
    def write(source: Path, target: Path) -> None:
        from tests.runtime.loader.gguf_writer import Type, mixed, write_gguf

        write_gguf(source, target, mixed(*(Type[name] for name in names)))

    return Stored(family, _BLOCKS, write, ".gguf")


def _gptq(**config: Any) -> Stored:
    def write(source: Path, target: Path) -> None:
        from tests.runtime.loader.packer import pack_checkpoint

        section = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False, **config}
        pack_checkpoint(source, target, target.with_name("plain"), section)

    return Stored("llama", _LLAMA, write)


def _stored(name: str, family: str = "llama") -> Stored:
    """A format of tests/runtime/loader/stored_formats.py."""

    def write(source: Path, target: Path) -> None:
        from tests.runtime.loader.stored_checkpoints import write_checkpoint
        from tests.runtime.loader.stored_formats import FORMATS

        write_checkpoint(source, target, target.with_name("plain"), FORMATS[name])

    return Stored(family, _LLAMA, write)


def _mxfp4() -> Stored:
    def write(source: Path, target: Path) -> None:
        from tests.runtime.loader.stored_checkpoints import write_mxfp4_experts

        write_mxfp4_experts("gpt_oss", source, target, target.with_name("plain"))

    return Stored("gpt_oss", _GPT_OSS, write)


STORED = {
    "gguf-q4_k": _gguf("mixtral", "Q4_K"),
    "gguf-q4_k_m": _gguf("llama", "Q4_K", "Q6_K"),
    **{f"gguf-{name.lower()}": _gguf("llama", name) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")},
    **{f"gguf-{name.lower()}": _gguf("mixtral", name) for name in ("Q5_K", "Q6_K", "MXFP4")},
    "awq": _gptq(quant_method="awq", version="gemm", zero_point=True),
    "gptq": _gptq(),
    "gptq-8-bits": _gptq(bits=8),
    "gptq-act-order": _gptq(desc_act=True),
    "gptq-8-bits-act-order": _gptq(bits=8, desc_act=True),
    "fp8-blocks": _stored("fp8 blocks", "mixtral"),
    "fp8-blocks-w8a8": _stored("fp8 blocks", "mixtral")._replace(quantization="fp8_w8a8"),
    "fp8-a-tensor": _stored("fp8 a tensor"),
    "fp8-a-tensor-w8a8": _stored("fp8 a tensor")._replace(quantization="fp8_w8a8"),
    "fp8-blocks-as-int4": _stored("fp8 blocks", "mixtral")._replace(quantization="int4"),
    "gguf-q5_1-as-int8-w8a16": _gguf("llama", "Q5_1")._replace(quantization="int8_w8a16"),
    "fbgemm-fp8": _stored("fbgemm"),
    "compressed-float": _stored("float an output"),
    "compressed-int8": _stored("int8 with int8 inputs"),
    "compressed-int4": _stored("int4 with zero points"),
    "nvfp4": _stored("nvfp4"),
    "nf4": _stored("nf4 nested", "mixtral"),
    "fp4": _stored("fp4"),
    "bitsandbytes-int8": _stored("bitsandbytes int8"),
    "mxfp4": _mxfp4(),
}
SAMPLED_STORED = (
    "gguf-q4_k",
    "gguf-q4_k_m",
    "awq",
    "gptq-act-order",
    "fp8-blocks-w8a8",
    "fp8-blocks-as-int4",
    "nf4",
    "mxfp4",
)
"""Those of the ordinary run."""
