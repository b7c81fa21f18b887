"""A model as data: typed parts composed layer by layer. Nothing here knows of ranks, torch or file formats.

The runtime builds modules from a DecoderSpec, the scheduler its KV groups, `models.sizes` the bytes and FLOPs. A spec
travels to engines and workers as msgpack, so its parts are msgspec structs; they are sent without the names of their
fields, since there is a part for every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
DType = Literal["float32", "bfloat16", "float16"]
KVDType = DType | Literal["int8", "float8_e4m3fn"]
"""What the KV cache holds. Types of one byte have a float32 scale for each token and head (latents: each token)."""

DTYPE_BYTES: Mapping[KVDType, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
"""Bytes per element."""


class Norm(msgspec.Struct, frozen=True, array_like=True):
    """RMSNorm or LayerNorm over the last dim."""

    kind: Literal["rms", "layer"]
    eps: float
    weight_offset: float = 0.0
    """Added to the weight: 1.0 in Gemma."""
    bias: bool = False


class Rope(msgspec.Struct, frozen=True, array_like=True):
    """Rotary position embedding, scaling already folded in (a function of configuration only, never of length)."""

    inv_freq: tuple[float, ...]
    """[rotary_dim / 2], radians per position."""
    attention_scaling: float = 1.0
    """Multiplies cos and sin (YaRN's mscale)."""
    interleaved: bool = False
    """True: pairs (0,1), (2,3), ...; False: pairs (i, i + rotary_dim/2)."""


class GQA(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Grouped-query attention; multi-head and multi-query are its ends."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    window: int | None = None
    """A token sees itself and the window - 1 tokens before it."""
    softcap: float | None = None
    """scores = softcap * tanh(scores / softcap)"""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Norm | None = None
    """Over head_dim of q and k, before rope."""


class MLA(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one latent per token is key and value of all
    heads. It always runs absorbed: the up-projections of keys and values are applied to queries and outputs instead, so
    that what is cached per token is [kv_lora_rank + rope_head_dim] and prefill and decode have one set of bits.
    """

    num_heads: int
    kv_lora_rank: int
    nope_head_dim: int
    """Part of a query and key head that is not rotated."""
    rope_head_dim: int
    """Part that is; the key's is shared by all heads."""
    value_head_dim: int
    scale: float
    """Of the scores, YaRN's mscale folded in."""
    rope: Rope
    kv_norm: Norm
    """Over the latent."""
    q_lora_rank: int | None = None
    """None: queries are projected directly."""
    q_norm: Norm | None = None
    """Over the queries' latent; there is one iff q_lora_rank is set."""
    bias: bool = False
    """Of the projections down to the latents and of the output projection."""

    @property
    def window(self) -> None:
        """A token sees all tokens before it."""
        return None

    @property
    def query_head_dim(self) -> int:
        """Elements of one query head as it is projected."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Elements cached per token: the latent, then the part of the key that is rotated."""
        return self.kv_lora_rank + self.rope_head_dim


Attention = GQA | MLA


class Dense(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Feed-forward block: down(act(gate(x)) * up(x)), or down(act(up(x))) where it is not gated."""

    intermediate_size: int
    activation: Activation
    gated: bool = True
    bias: bool = False


class Routing(msgspec.Struct, frozen=True, array_like=True):
    """How a token chooses its experts: scores in fp32, the best `experts_per_token` of them, lowest id on ties."""

    num_experts: int
    experts_per_token: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Of the router's logits over all experts, before any are chosen."""
    normalized: bool = True
    """Whether the chosen experts' scores are divided by their sum."""
    scale: float = 1.0
    """Multiplies the weights at the end."""
    num_groups: int = 1
    """Experts lie in groups of equal size; only the best `top_groups` groups are eligible."""
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    """A group's score, from those of its experts."""
    correction_bias: bool = False
    """A learned bias per expert is added to the scores for choosing, not to the weights (DeepSeek-V3)."""


class MoE(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Mixture of experts: sum over a token's chosen experts of weight * expert(x), plus what every token passes."""

    routing: Routing
    expert: Dense
    shared: Dense | None = None
    """One block for every token, as wide as all shared experts together."""
    shared_gate: bool = False
    """The shared block's output is multiplied by sigmoid(x . gate) (Qwen2-MoE)."""


class Layer(msgspec.Struct, frozen=True, array_like=True):
    """One decoder layer: x += post(attention(pre(x))), then x += post(feed_forward(pre(x)))."""

    attention: Attention
    feed_forward: Dense | MoE
    attention_norm: Norm
    feed_forward_norm: Norm
    post_attention_norm: Norm | None = None
    post_feed_forward_norm: Norm | None = None


class DecoderSpec(msgspec.Struct, frozen=True, array_like=True):
    """A decoder-only language model."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    final_norm: Norm
    max_position_embeddings: int
    """Longest sequence that the configuration allows, rope scaling included."""
    dtype: DType
    """Type of the checkpoint."""
    tied_embeddings: bool = False
    embedding_scale: float = 1.0
    """Multiplies token embeddings, rounded to the activations' type (Gemma)."""
    learned_positions: int | None = None
    """Rows of a learned position embedding (GPT-2)."""
    lm_head_bias: bool = False
    logits_softcap: float | None = None


class TensorSource(msgspec.Struct, frozen=True, array_like=True):
    """Where a canonical parameter lies in a checkpoint.

    The parameter is checkpoint tensor `key`, transposed where the file stores [in, out], then its rows
    [start, start + count) where several parameters share one tensor.
    """

    key: str
    transposed: bool = False
    rows: tuple[int, int] | None = None
    """(start, count) along the parameter's dim 0, counted after transposition."""
    aliases: tuple[str, ...] = ()
    """Other names of the tensor, for checkpoints that have no `key`: the first found counts."""
