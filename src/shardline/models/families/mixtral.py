"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from shardline.models.config_fields import Defaults, read_routing
from shardline.models.feed_forward import MoE
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import MIXTRAL_LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(vocab=32000, hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, positions=131072)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    llama = llama_like(hf, max_model_len, _DEFAULTS, norm=Norm("rms", 1e-5), theta=1e6)
    gqa = llama.attention.changed(window=hf.optional_integer("sliding_window", None))
    moe = MoE(read_routing(hf, num_experts=8, experts_per_token=2, normalized=True), llama.dense)
    return llama.spec(llama.layer(gqa, moe))


tensor_source = checkpoint_keys(MIXTRAL_LAYER_KEYS)
