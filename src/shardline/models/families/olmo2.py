"""OLMo 2: Llama with norms after each block instead of before it, and norms over all heads of q and k."""

from __future__ import annotations

from shardline.models.attention import GQA
from shardline.models.config_fields import Defaults
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import POST_NORM_LAYER_KEYS, LlamaLike, checkpoint_keys, llama_like
from shardline.models.parts import Norm
from shardline.models.rope import RopeConfig
from shardline.models.spec import DecoderSpec

DEFAULTS = Defaults(vocab=50304, hidden=4096, intermediate=11008, layers=32, heads=32, positions=2048)


def read_olmo(hf: HFConfig, max_model_len: int | None, rope: RopeConfig | None = None) -> tuple[LlamaLike, GQA]:
    """What OLMo 2 and 3 share, and their attention without a window."""
    llama = llama_like(hf, max_model_len, DEFAULTS, norm=Norm("rms", 1e-5, rounds_once=True), rope=rope)
    return llama, llama.biased(qk_norm=llama.norm, norms_all_heads=True)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    llama, gqa = read_olmo(hf, max_model_len)
    return llama.spec(llama.post_norm_layer(gqa))


tensor_source = checkpoint_keys(POST_NORM_LAYER_KEYS)
