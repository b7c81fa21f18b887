"""The numeric contract: what a request's tokens depend on besides the request. The system_fingerprint is its name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from shardline.deployment.deployment import Deployment
from shardline.models.parts import Part
from shardline.watermark.keys import key_name

NUMERICS_VERSION = 12
"""Part of the contract. It changes whenever a request may get other bits than in the version before."""

_FIRST_FIELDS: Mapping[str, str] = {
    "GQA": "num_heads num_kv_heads head_dim scale rope window softcap qkv_bias output_bias qk_norm norms_all_heads"
    " sinks chunked rotated_norm query_scale value_is_key value_norm",
    "MLA": "num_heads kv_lora_rank nope_head_dim rope_head_dim value_head_dim scale rope kv_norm q_lora_rank q_norm"
    " bias query_scale",
    "Routing": "num_experts experts_per_token scoring normalized scale num_groups top_groups group_score"
    " correction_bias logits_bias logits_scale expert_scale scales_input",
    "Dense": "intermediate_size activation gated bias",
    "MoE": "routing expert shared shared_gate own_norms",
    "Norm": "kind eps weight_offset bias rounds_once",
    "Rope": "inv_freq attention_scaling interleaved",
    "QueryScale": "beta length offset",
    "Layer": "attention feed_forward attention_norm feed_forward_norm post_attention_norm post_feed_forward_norm"
    " parallel residual_scale output_scale",
    "DecoderSpec": "model_type vocab_size hidden_size layers final_norm max_position_embeddings dtype tied_embeddings"
    " embedding_scale learned_positions lm_head_bias logits_softcap logits_scale",
}
"""The fields of parts in the first release, in their order. Later ones count if they are set."""

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
    """The version of the numerics; if they are fast, the layout too; if answers are marked, the key's name."""
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
    layout = f"tp{grid.sharing}" + ("-ep" if deployment.expert_parallel else "")
    mark = "".join(f"-{key_name(key)}" for key in deployment.watermark)
    return NumericContract(
        weights=digest.hexdigest(),
        dtype=deployment.dtype,
        format=deployment.weight_format.open_format().label,
        kv_dtype="" if deployment.cache.dtype == deployment.dtype else deployment.cache.dtype,
        numerics=(f"n{NUMERICS_VERSION}" if deployment.numerics == "exact" else f"fast-{layout}") + mark,
        kernel_path=kernel_path,
    )


def _describe(value: object) -> str:
    """The repr of a spec as in the first release: traits in their part, and no later field that has its default."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))}{',' * (len(value) == 1)})"
    if not isinstance(value, Part):
        return repr(value)
    kind, found = type(value).__name__, {field.name: (field, one) for field, one in value.all_fields()}
    first = _FIRST_FIELDS[kind].split() if kind in _FIRST_FIELDS else list(found)
    later = [name for name, (field, one) in found.items() if name not in first and one != field.default]
    return f"{kind}({', '.join(f'{name}={_describe(found[name][1])}' for name in [*first, *later])})"


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
