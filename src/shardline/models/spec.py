"""A model as data: typed parts, layer by layer. Nothing here knows ranks, torch or file formats.

From a DecoderSpec the runtime builds its modules, the scheduler gets its KV groups, and `models.sizes` computes bytes
and FLOPs. A spec is sent to engines and workers as msgpack, so its parts are msgspec structs. They are sent without
field names, since there is a part for every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swish"]
"""clamped_swish is gpt-oss's gate: (clamp(up, -7, 7) + 1) * g * sigmoid(1.702 g) for g = min(gate, 7)."""
DType = Literal["float32", "bfloat16", "float16"]
KVDType = DType | Literal["int8", "float8_e4m3fn"]
"""Types of the KV cache. One-byte types have a float32 scale for each token and head (latents: for each token)."""

DTYPE_BYTES: Mapping[KVDType, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
"""Bytes per element."""


class Norm(msgspec.Struct, frozen=True, array_like=True):
    """RMSNorm or LayerNorm over the last dim."""

    kind: Literal["rms", "layer"]
    eps: float
    weight_offset: float = 0.0
    """Number that is added to the weight: 1.0 in Gemma."""
    bias: bool = False
    rounds_once: bool = False
    """Whether an RMSNorm's quotient is multiplied by the weight before it is rounded, as it is with an offset."""


class Rope(msgspec.Struct, frozen=True, array_like=True):
    """Rotary position embedding with its scaling folded in. It depends on the configuration, never on the length."""

    inv_freq: tuple[float, ...]
    """[rotary_dim / 2], radians per position."""
    attention_scaling: float = 1.0
    """Factor of cos and sin (YaRN's mscale)."""
    interleaved: bool = False
    """True: pairs (0,1), (2,3), ...; False: pairs (i, i + rotary_dim/2)."""


class QueryScale(msgspec.Struct, frozen=True, array_like=True):
    """A factor of queries that grows with their position: 1 + beta * ln(1 + floor((position + offset) / length))."""

    beta: float
    length: int
    offset: int = 0


class GQA(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Grouped-query attention. Multi-head and multi-query attention are its extreme cases."""

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
    """Norm over head_dim of q and k, before rope."""
    norms_all_heads: bool = False
    """Whether qk_norm is over all heads of q at once, and over all heads of k (OLMo 2, MiniMax-M2)."""
    sinks: bool = False
    """Whether each head has a learned score of a key without a value, which every token sees (gpt-oss)."""
    chunked: bool = False
    """Whether `window` is the size of chunks: a token sees the tokens of its own chunk (Llama 4)."""
    rotated_norm: Norm | None = None
    """Norm without weights over head_dim of q and k, after rope (Llama 4)."""
    query_scale: QueryScale | None = None
    value_is_key: bool = False
    """Whether values are the projected keys before their norm, so there is no weight of v (Gemma 4)."""
    value_norm: Norm | None = None
    """Norm without weights over head_dim of values (Gemma 4)."""
    kv_source: int | None = None
    """The layer whose cached keys and values this layer reads. It then projects and stores none (Gemma 4)."""

    @property
    def value_head_dim(self) -> int:
        """Elements of a value head."""
        return self.head_dim


class Indexer(msgspec.Struct, frozen=True, array_like=True):
    """The part of sparse attention that chooses the tokens to attend to (DeepSeek-V3.2, MiniMax-M3).

    It caches a key of one-byte elements and a float32 scale per token.
    """

    num_heads: int
    head_dim: int
    top_k: int
    """The most tokens that a token attends to."""


class PlannedGQA(GQA, frozen=True, array_like=True, tag=True):
    """Grouped-query attention with parts that only the planner knows."""

    output_gate: bool = False
    """Whether q has as many further rows, whose sigmoid multiplies the output (Qwen3.5)."""
    value_size: int | None = None
    """Elements of a value head; None: as many as of a key head (other in MiMo-V2)."""
    indexer: Indexer | None = None
    """None: a token sees all tokens of its window."""

    @property
    def value_head_dim(self) -> int:
        """Elements of a value head."""
        return self.head_dim if self.value_size is None else self.value_size


class MLA(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one latent per token is key and value of all heads.

    It always uses the absorbed form, which applies the up-projections of keys and values to queries and outputs. So the
    cache holds [kv_lora_rank + rope_head_dim] per token, and prefill and decode give the same bits.
    """

    num_heads: int
    kv_lora_rank: int
    nope_head_dim: int
    """Size of the part of a query and key head that is not rotated."""
    rope_head_dim: int
    """Size of the rotated part. All heads share the key's rotated part."""
    value_head_dim: int
    scale: float
    """Factor of the scores, with YaRN's mscale folded in."""
    rope: Rope
    kv_norm: Norm
    """Norm over the latent."""
    q_lora_rank: int | None = None
    """None: queries are projected directly."""
    q_norm: Norm | None = None
    """Norm over the queries' latent. It exists if and only if q_lora_rank is set."""
    bias: bool = False
    """Whether the projections down to the latents and the output projection have a bias."""
    query_scale: QueryScale | None = None

    @property
    def window(self) -> None:
        """A token sees all tokens before it."""
        return None

    @property
    def query_head_dim(self) -> int:
        """Elements of one projected query head."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Elements cached per token: the latent, then the rotated part of the key."""
        return self.kv_lora_rank + self.rope_head_dim


class SparseMLA(MLA, frozen=True, array_like=True, tag=True):
    """Latent attention to the tokens that an indexer chooses. Only the planner knows it."""

    indexer: Indexer = Indexer(64, 128, 2048)


class LinearAttention(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Gated delta rule (Yang et al., 2024): a state of fixed size per request instead of keys and values per token.

    Only the planner knows it. A short causal convolution precedes the rule.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    """Tokens that the convolution sees."""

    @property
    def num_heads(self) -> int:
        """Heads that ranks can share: a rank gets whole key heads."""
        return self.num_key_heads

    @property
    def window(self) -> None:
        """No token is cached, so no window limits the cache."""
        return None

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.value_size

    @property
    def value_size(self) -> int:
        """Elements of all value heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def state_size(self) -> int:
        """Elements of the state of one request, without the convolution's."""
        return self.value_size * self.key_head_dim


Attention = GQA | MLA | LinearAttention


class Dense(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Feed-forward block: down(act(gate(x)) * up(x)), or down(act(up(x))) if it is not gated."""

    intermediate_size: int
    activation: Activation
    gated: bool = True
    bias: bool = False


class Routing(msgspec.Struct, frozen=True, array_like=True):
    """How a token chooses experts: the `experts_per_token` best fp32 scores, and the lowest id on ties."""

    num_experts: int
    experts_per_token: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's logits over all experts. It is applied before experts are chosen."""
    normalized: bool = True
    """Whether the chosen experts' scores are divided by their sum."""
    scale: float = 1.0
    """Factor of the experts' weights, applied last."""
    num_groups: int = 1
    """Experts form groups of equal size. Only experts of the best `top_groups` groups are eligible."""
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    """How the score of a group follows from the scores of its experts."""
    correction_bias: bool = False
    """Whether a learned bias per expert is added to the scores for choosing; it is not in the weights (DeepSeek-V3)."""
    logits_bias: bool = False
    """Whether a learned bias per expert is added to the router's logits (gpt-oss)."""
    logits_scale: float = 1.0
    """Factor of the router's logits."""
    expert_scale: bool = False
    """Whether each expert has a learned factor of its weight, applied last (Gemma 4)."""
    scales_input: bool = False
    """Whether a token's weight multiplies the expert's input instead of its output (Llama 4). A token then has one
    expert."""


class MoE(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Mixture of experts: the sum of weight * expert(x) over a token's chosen experts, plus the shared block."""

    routing: Routing
    expert: Dense
    shared: Dense | None = None
    """A block for every token. It is as wide as all shared experts together."""
    shared_gate: bool = False
    """Whether the shared block's output is multiplied by sigmoid(x . gate) (Qwen2-MoE)."""
    own_norms: Norm | None = None
    """The router and the experts read norms of their own of the residual stream, and the outputs of the experts and of
    the shared block are normalised before they are added (Gemma 4)."""

    @property
    def latent_size(self) -> int | None:
        """Elements of the experts' inputs and outputs; None: as many as of the residual stream."""
        return None


class PlannedMoE(MoE, frozen=True, array_like=True, tag=True):
    """Experts that compute in a smaller space, with projections into it and out of it. Only the planner knows it."""

    latent: int = 1024

    @property
    def latent_size(self) -> int | None:
        """Elements of the experts' inputs and outputs."""
        return self.latent


class TokenInput(msgspec.Struct, frozen=True, array_like=True):
    """What a layer reads of the token itself: x += norm(down(act(gate(x)) * input)) after its blocks (Gemma 4).

    input = (norm(projection(e) / sqrt(hidden_size)) + sqrt(size) * row) / sqrt(2). Here e is the token's embedding, and
    row is the token's row of a table that the layer has of its own.
    """

    size: int
    """Elements of `input`."""
    vocab_size: int
    """Rows of the table."""
    activation: Activation
    norm: Norm
    """The kind of both norms."""


class Layer(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """One decoder layer: x += post(attention(pre(x))), then x += post(feed_forward(pre(x))).

    A norm that is None is left out.
    """

    attention: Attention
    feed_forward: Dense | MoE
    """A Dense of size 0 stands for none: a layer of Nemotron-H may be attention alone."""
    attention_norm: Norm | None
    feed_forward_norm: Norm | None
    post_attention_norm: Norm | None = None
    post_feed_forward_norm: Norm | None = None
    parallel: bool = False
    """Whether attention_norm feeds both blocks: x += attention(pre(x)) + feed_forward(pre(x)) (Cohere)."""
    residual_scale: float = 1.0
    """Factor of each block's output before it is added (Granite)."""
    output_scale: bool = False
    """Whether the residual stream is multiplied by a learned number after the layer (Gemma 4)."""
    token_input: TokenInput | None = None

    @property
    def residual_streams(self) -> int:
        """Number of residual streams."""
        return 1


class DecoderSpec(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
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
    """Factor of token embeddings, rounded to the activations' type (Gemma)."""
    learned_positions: int | None = None
    """Number of rows of a learned position embedding (GPT-2); None: there is none."""
    lm_head_bias: bool = False
    logits_softcap: float | None = None
    logits_scale: float = 1.0
    """Factor of the logits (Cohere, Granite)."""

    @property
    def token_input(self) -> TokenInput | None:
        """What each layer reads of the token itself. All layers have one of the same size, or none has one."""
        return self.layers[0].token_input

    @property
    def residual_streams(self) -> int:
        """Number of residual streams. All layers have as many."""
        return self.layers[0].residual_streams


class TensorSource(msgspec.Struct, frozen=True, array_like=True):
    """The place of a canonical parameter in a checkpoint.

    The parameter is the tensor `key`, or a part of it, taken in this order: one of the tensors that it stacks
    (`index`); its transpose, if the file stores [in, out]; some rows; some columns.
    """

    key: str
    transposed: bool = False
    rows: tuple[int, int] | None = None
    """(start, count) along the parameter's dim 0, counted after transposition."""
    aliases: tuple[str, ...] = ()
    """Other names of the tensor, for checkpoints without `key`. The first one that exists is used."""
    row_step: int = 1
    """Distance of neighbouring rows of the parameter: 2 if the rows of two parameters alternate. It needs `rows`."""
    index: tuple[int, int] | None = None
    """(index, count): the tensor stacks `count` tensors along a first dim, for example those of all experts."""
    columns: tuple[int, int] | None = None
    """(start, count) along the parameter's dim 1; only for tensors that are not transposed."""
    apart: str = ""
    """The name of the parameter's own tensor in checkpoints whose quantizer took stacked tensors apart: [out, in]."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor for a parameter with `shape`, if no other parameter has later rows or columns of it."""
        if self.rows is not None:
            start, count = self.rows
            shape = (start - start % self.row_step + count * self.row_step, *shape[1:])
        if self.columns is not None:
            shape = (shape[0], sum(self.columns))
        if self.transposed:
            shape = shape[::-1]
        return shape if self.index is None else (self.index[1], *shape)
