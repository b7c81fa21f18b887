"""The numeric contract: what a request's tokens depend on besides the request. The system_fingerprint is its name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec.structs import asdict, fields

from shardline.deployment.deployment import Deployment
from shardline.models.attention import GQA, GQA_PARTS

NUMERICS_VERSION = 8
"""Part of the contract. It changes whenever a request may get other bits than in the version before."""

_LATER_FIELDS = {"num_labels", "token_input"}
"""Fields of the spec that came after the first release. A model without them keeps the fingerprint that it had."""

_FIRST_FIELDS = (
    *("num_heads", "num_kv_heads", "head_dim", "scale", "rope", "window", "softcap", "qkv_bias", "output_bias"),
    *("qk_norm", "norms_all_heads", "sinks", "chunked", "rotated_norm", "query_scale", "value_is_key", "value_norm"),
)
"""The fields of a GQA and of its parts in the first release, in their order. Later ones count if they are set."""

_SAMPLE_BYTES = 1 << 20


class NumericContract(msgspec.Struct, frozen=True):
    """Engines with equal contracts give equal tokens to equal requests with equal seeds."""

    weights: str
    """Digest of the weights, and of the model's structure."""
    dtype: str = ""
    format: str = ""
    """The weights' format, if it is not `dtype`."""
    kv_dtype: str = ""
    """The KV cache's dtype, if it is not `dtype`."""
    numerics: str = ""
    """The version of the numerics; if they are fast, the layout too."""
    kernel_path: str = ""

    @property
    def fingerprint(self) -> str:
        """The system_fingerprint of answers: those of two contracts are equal if the contracts are."""
        parts = (self.dtype, self.format, self.kv_dtype and f"kv-{self.kv_dtype}", self.numerics, self.kernel_path)
        return "-".join(["sl", self.weights, *filter(None, parts)])

    @property
    def sha256(self) -> str:
        """64 hex digits over all of it."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


def numeric_contract(deployment: Deployment, kernel_path: str) -> NumericContract:
    """The contract of weights, spec, formats, numerics and `kernel_path`.

    This function reads samples of the weight files.
    """
    model, grid = deployment.model, deployment.grid
    digest = hashlib.blake2b(digest_size=6)
    dummy_seed = model.seed if model.load_format == "dummy" else None
    digest.update(weights_fingerprint(model.config_text, map(Path, model.weight_files), dummy_seed).encode())
    # The spec has the rope frequencies, which may depend on max_model_len.
    digest.update(_describe(deployment.spec).encode())
    layout = f"tp{grid.tensor}" + ("-ep" if deployment.expert_parallel else "")
    return NumericContract(
        weights=digest.hexdigest(),
        dtype=deployment.dtype,
        format=deployment.weight_format.open_format().label,
        kv_dtype="" if deployment.cache.dtype == deployment.dtype else deployment.cache.dtype,
        numerics=f"n{NUMERICS_VERSION}" if deployment.numerics == "exact" else f"fast-{layout}",
        kernel_path=kernel_path,
    )


def _describe(value: object) -> str:
    """The repr of a spec, without later fields that are None."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))}{',' * (len(value) == 1)})"
    if not isinstance(value, msgspec.Struct):
        return repr(value)
    values = _attention_fields(value) if isinstance(value, GQA) else asdict(value)
    words = (f"{n}={_describe(v)}" for n, v in values.items() if v is not None or n not in _LATER_FIELDS)
    return f"{type(value).__name__}({', '.join(words)})"


def _attention_fields(attention: GQA) -> dict[str, object]:
    """The fields of the attention and of its parts, without later ones that have their defaults."""
    later, first = {}, {}
    for part in (attention, *(part for part in asdict(attention).values() if isinstance(part, GQA_PARTS))):
        for field in fields(part):
            value = getattr(part, field.name)
            if field.name in _FIRST_FIELDS:
                first[field.name] = value
            elif value != field.default and not isinstance(value, GQA_PARTS):
                later[field.name] = value
    return {name: first[name] for name in _FIRST_FIELDS} | later


def weights_fingerprint(config_text: str, weight_files: Iterable[Path], dummy_seed: int | None = None) -> str:
    """16 hex digits that name a model: a hash of its config.json with sorted keys, and of its weight files.

    Of each file, in order of name, the hash covers the name, the size, the first and the last MiB (the first holds the
    safetensors header), and 16 samples of 4 KiB between them. Two fine-tunes of one model differ almost everywhere, so
    the samples tell them apart. A change of a few bytes in the middle of a file may stay unnoticed. If there are no
    weight files, `dummy_seed` stands for the weights.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(config_text.encode())
    digest.update(f"dummy {dummy_seed}".encode())
    for file in sorted(weight_files):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for offset, count in _samples(size):
                stream.seek(offset)
                digest.update(stream.read(count))
    return digest.hexdigest()


def _samples(size: int) -> list[tuple[int, int]]:
    """(offset, count) of the sampled bytes of a file of `size` bytes."""
    if size <= 2 * _SAMPLE_BYTES:
        return [(0, size)]
    between = [(size * part // 17, 4096) for part in range(1, 17)]
    return [(0, _SAMPLE_BYTES), *between, (size - _SAMPLE_BYTES, _SAMPLE_BYTES)]
