"""GLM-4.5 to 4.7: DeepSeek V3's experts, with grouped-query attention whose rope rotates half a head."""

from __future__ import annotations

from shardline.models.config_fields import Defaults
from shardline.models.deepseek_like import DEEPSEEK_MOE_LAYER_KEYS, dense_first, group_routing, mixture
from shardline.models.heads import LAYER_LAYOUT
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import checkpoint_keys, llama_like
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(vocab=151552, hidden=4096, intermediate=10944, layers=46, heads=96, kv_heads=8, positions=131072)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layer for multi-token prediction is a head of its own."""
    hf = hf.with_values(defaults={"partial_rotary_factor": 0.5})
    llama = llama_like(hf, max_model_len, _DEFAULTS, norm=Norm("rms", 1e-5), partial=True)
    qk_norm = llama.norm if hf.flag("use_qk_norm", False) else None
    gqa = llama.attention.changed(qkv_bias=hf.flag("attention_bias", False), qk_norm=qk_norm)
    routing = group_routing(hf, num_experts=128, chosen=8, scale=1.0)
    moe = llama.layer(gqa, mixture(hf, routing, expert_size=1408, num_shared=1))
    return llama.spec(dense_first(hf, llama.dims, 1, llama.layer(gqa), moe))


tensor_source = checkpoint_keys(DEEPSEEK_MOE_LAYER_KEYS)
PREDICTOR = LAYER_LAYOUT
