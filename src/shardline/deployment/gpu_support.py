"""What the GPU's own kernels lack, as data: torch computes these ops there, and what is in no list is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardline.models.spec import DecoderSpec

_SUPPORTED: Mapping[str, str] = {
    "DecoderSpec": "tied_embeddings embedding_scale learned_positions lm_head_bias logits_softcap num_labels",
    "Layer": "post_attention_norm post_feed_forward_norm parallel",
    "GQA": "",
    "Projections": "qkv_bias output_bias value_is_key",
    "Score": "softcap",
    "Positions": "rope",
    "Mask": "window",
    "HeadNorms": "qk_norm norms_all_heads rotated_norm value_norm",
    "KV": "kv_source",
    "MLA": "",
    "Indexer": "interleaved is_shared",
    "LatentProjections": "q_lora_rank q_norm bias",
    "LinearAttention": "",
    "Mamba2": "conv_bias",
    "Dense": "gated bias silu gelu gelu_tanh relu relu2 clamped_swish",
    "MoE": "shared shared_gate own_norms latent",
    "Routing": "scoring normalized scale num_groups top_groups group_score correction_bias logits_bias",
    "Norm": "weight_offset bias rounds_once",
    "Rope": "attention_scaling interleaved",
    "TokenInput": "",
}
"""What no list of lacks needs, see `Part.missing`."""

GRAPHS = "graphs"
"""No op, but a way of running layers: in CUDA graphs. Without it, layers are launched op by op."""

_LACKS: Mapping[str, tuple[str, ...]] = {
    "attention sinks": ("attention",),
    "attention in chunks": ("attention",),
    "biases of experts": ("experts",),
    "scale of queries by position": ("scale_rows",),
    "scaled logits": ("scale_rows",),
    "scale of the residual stream": ("scale_rows",),
    "scale of a router's logits": ("scale_rows",),
    "scale of experts' weights": ("scale_rows",),
    "scale of experts' inputs": ("scale_rows",),
    "layers with inputs of their own for each token": (GRAPHS,),
    "attention to chosen tokens": (GRAPHS,),
    "states of requests": ("linear_attention", GRAPHS),
    "gated attention": ("gate_heads",),
    "values of another size than keys": ("attention",),
    "scale of values": ("scale_rows",),
}
"""The kinds of kernels (`kernel_cases.KernelCase.kernel`, and ops that have no cases) that lack a part, by the part's
words."""


def lacking_kernels(spec: DecoderSpec) -> dict[str, str]:
    """The kinds of kernels that are not used for a model, and what they lack, in words."""
    lacks: dict[str, list[str]] = {}
    for words in _missing(spec):
        for kernel in _LACKS.get(words, ()):
            lacks.setdefault(kernel, []).append(words)
    return {kernel: f"Triton's has no {', no '.join(lacks[kernel])}" for kernel in sorted(lacks)}


def computed_by_torch(spec: DecoderSpec) -> dict[str, str]:
    """Of these, the ops that torch computes."""
    return {kernel: why for kernel, why in lacking_kernels(spec).items() if kernel != GRAPHS}


def check_gpu_support(spec: DecoderSpec, *, only_triton: bool) -> None:
    """Refuse what GPUs do not run without `--kernels torch`.

    Raises:
        ValueError: the message says what is missing, and what would work.
    """
    if refusal := gpu_refusal(spec):
        raise ValueError(f"{refusal}; --kernels torch runs it there too, more slowly")
    if only_triton and (by_torch := computed_by_torch(spec)):
        named = "; ".join(f"{kernel}, since {why}" for kernel, why in by_torch.items())
        raise ValueError(f"--kernels triton, and torch would compute of {spec.model_type}: {named}; use --kernels auto")


def gpu_refusal(spec: DecoderSpec) -> str:
    """Why GPUs cannot run a model, in one line; empty: they can."""
    missing = [words for words in _missing(spec) if words not in _LACKS]
    return f"GPUs do not run {spec.model_type}: they have no {', no '.join(missing)}" if missing else ""


def _missing(spec: DecoderSpec) -> Iterator[str]:
    """What the kernels lack, each once."""
    parts = (*dict.fromkeys(spec.layers), spec)
    yield from dict.fromkeys(words for part in parts for words in part.missing(_SUPPORTED))
