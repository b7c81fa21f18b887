"""What kinds of attention say: their weights, how ranks share them, what they cache, and how much they compute; and
grouped-query attention. Latent attention is in `mla.py`, and the planner has further kinds in `planner/models/parts/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from shardline.models.partition import Span, split_dim, split_heads
from shardline.models.parts import (
    DTYPE_BYTES,
    DType,
    KVDType,
    KVPart,
    Norm,
    Parameters,
    Part,
    QueryScale,
    Rope,
    Trait,
    linear_parameters,
    norm_parameters,
)


@dataclass(frozen=True)
class AttentionWork:
    """Attention of equal layers on a rank, summed over these layers."""

    window: int | None
    """The most tokens that a token attends to; None: all before it."""
    bytes_per_token: float
    """Bytes of keys and values of one cached token."""
    decode_flops: float
    """Operations of a decoded token with one cached token."""
    prefill_flops: float
    """Operations of a prompt's token with one token before it."""

    def scaled(self, number: float) -> AttentionWork:
        """`number` times as much work, over the same tokens."""
        return AttentionWork(
            self.window, number * self.bytes_per_token, number * self.decode_flops, number * self.prefill_flops
        )


class Attention(Part, frozen=True, array_like=True):
    """What all kinds of attention can be asked. Names of parameters begin with `attention.`."""

    shares_cache: ClassVar[bool] = False
    """Whether all heads read all that is cached, so that ranks may share one cache."""
    keeps_state: ClassVar[bool] = False
    """Whether a request has a state of fixed size, which each of its tokens changes."""

    num_heads: int
    """Heads that ranks can share."""

    @property
    def window(self) -> int | None:
        """A token sees itself and the window - 1 tokens before it; None: all tokens before it."""
        return None

    @property
    def kv_source(self) -> int | None:
        """The layer whose cache this layer reads; None: its own."""
        return None

    @property
    def num_chosen(self) -> int:
        """Of the tokens that a token sees, how many it attends to at most; 0: all."""
        return 0

    @property
    def reads_choice(self) -> bool:
        """Whether tokens attend to those that an earlier layer has chosen."""
        return False

    @property
    def num_kv_heads(self) -> int:
        """Heads of what is cached. Ranks that have no head of their own share one."""
        return 1

    @property
    def key_dim(self) -> int:
        """Elements of a cached key in one head; 0: there are no keys."""
        raise NotImplementedError

    @property
    def value_head_dim(self) -> int:
        """Elements of the output for a token and a head."""
        raise NotImplementedError

    @property
    def output_size(self) -> int:
        """Elements of the output for a token, over all heads."""
        return self.num_heads * self.value_head_dim

    @property
    def latent_sizes(self) -> tuple[int, ...]:
        """Elements of the latents of queries, of keys and values, and of the rotated part of keys; empty: none."""
        return ()

    @property
    def output_groups(self) -> int:
        """Groups of heads whose outputs are projected apart; 0: there are none."""
        return 0

    @property
    def partial_size(self) -> int:
        """Elements of what is merged for a token if ranks share its keys: each head's maximum, sum and output."""
        return 2 * self.num_heads + self.output_size if self.key_dim else 0

    def gathered(self, hidden_size: int) -> tuple[int, int]:
        """(elements for a token, gathers) that tensor-parallel ranks exchange if no sum crosses a rank."""
        latents = sum(self.latent_sizes)
        return self.output_size + hidden_size + latents, 2 + (latents > 0)

    def absorbed_size(self, ranks: int) -> int:
        """Elements that the fullest of `ranks` has of weights which the absorbed form multiplies from both sides."""
        return 0

    @property
    def multiplications_per_pair(self) -> int:
        """Multiplications of one query with one key and its value, over all heads."""
        raise NotImplementedError

    @property
    def num_launches(self) -> int:
        """Kernels in a usual implementation, the norm before it included."""
        raise NotImplementedError

    def parameters(self, hidden_size: int) -> Parameters:
        """The parameters, see `models.parameters`."""
        raise NotImplementedError

    def split_heads(self, ranks: int) -> tuple[Span, ...]:
        """The query heads of each rank.

        Raises:
            ValueError: a rank would have no head.
        """
        if ranks > self.num_heads:
            raise ValueError(f"{ranks} ranks cannot share {self.num_heads} attention heads")
        return split_dim(self.num_heads, ranks)

    def kv_heads_of(self, ranks: int) -> tuple[int, ...]:
        """Heads of what each of `ranks` caches."""
        return tuple(span.size for span in self.kv_spans_of(ranks))

    def kv_spans_of(self, ranks: int) -> tuple[Span, ...]:
        """The heads of what is cached that each of `ranks` reads. Two ranks read the same, or none in common."""
        if self.num_kv_heads == 1:
            return (Span(0, 1),) * ranks
        return tuple(share.kv_heads for share in split_heads(self.num_heads, self.num_kv_heads, ranks))

    def kv_heads_held(self, ranks: int, context: int, rank: int) -> tuple[int, ...]:
        """Numbers of KV heads that a rank caches for itself and the other ranks of its context group, `context` of
        `ranks` in a row. Each number is of one or several ranks, in their order."""
        first = rank // context * context
        return tuple(span.size for span in dict.fromkeys(self.kv_spans_of(ranks)[first : first + context]))

    def split(self, part: str, rank: int, ranks: int) -> Span | None:
        """What one of `ranks` has of parameter `part`: some rows, but of the output projection some columns.

        None: all of it. The output projection is split so only if its products are added up.

        Raises:
            KeyError: there is no such parameter.
        """
        if part == "attention.o":
            return self.split_heads(ranks)[rank].scaled(self.output_size // self.num_heads)
        raise KeyError(part)

    def kv_parts(self, num_kv_heads: int, num_blocks: int, block_size: int, dtype: KVDType) -> tuple[KVPart, ...]:
        """The cache tensors of a layer on a rank that has `num_kv_heads` of the KV heads. A page has a block."""
        raise NotImplementedError

    def work(self, ranks: int, dtype: KVDType, *, expands: bool = False) -> Iterator[AttentionWork]:
        """The work of one layer on the fullest of `ranks` with a KV cache of type `dtype`.

        With `expands`, prompts compute latent attention with the keys and values of each head, not in the dims of the
        latent.
        """
        flops = 2 * self.multiplications_per_pair / ranks
        yield AttentionWork(self.window, cached_token_bytes(self, ranks, dtype), flops, flops)

    def state_bytes(self, rank: int, ranks: int, dtype: DType = "bfloat16") -> int:
        """Bytes of the state of one request on a rank, whatever its length, for activations of `dtype`."""
        return 0


def cached_token_bytes(attention: Attention, ranks: int, dtype: KVDType) -> float:
    """Bytes of one token in one layer on the fullest of `ranks`, without scales per token."""
    heads = max(attention.kv_heads_of(ranks))
    plain: KVDType = "bfloat16"
    return sum(
        part.num_bytes if part.dtype != plain else part.num_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES[plain]
        for part in attention.kv_parts(heads, 1, 1, plain)
    )


class Projections(Trait, frozen=True, array_like=True):
    """The linears of queries, keys, values and of the output."""

    words: ClassVar[Mapping[str, str]] = {
        "reads_token": "attention to hidden states beside tokens",
        "output_gate": "gated attention",
        "value_size": "values of another size than keys",
        "value_scale": "scale of values",
    }

    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    value_is_key: bool = False
    """Whether values are the projected keys before their norm, so there is no weight of v (Gemma 4)."""
    reads_token: bool = False
    """Whether they read 2 * hidden_size elements, see `HeadInput.sources`."""
    value_size: int | None = None
    """Elements of a value head; None: as many as of a key head (MiMo-V2)."""
    value_scale: float = 1.0
    """Factor of values (MiMo-V2)."""
    output_gate: bool = False
    """Whether q has head_dim more rows behind those of each head, whose sigmoid multiplies the head's output
    (Qwen3.5)."""


class HeadNorms(Trait, frozen=True, array_like=True):
    """Norms of queries, keys and values. Only `qk_norm` has weights."""

    qk_norm: Norm | None = None
    """Norm over head_dim of q and k, before rope."""
    norms_all_heads: bool = False
    """Whether qk_norm is over all heads of q at once, and over all heads of k (OLMo 2, MiniMax-M2)."""
    rotated_norm: Norm | None = None
    """Norm over head_dim of q and k, after rope (Llama 4)."""
    value_norm: Norm | None = None
    """Norm over head_dim of values (Gemma 4)."""

    def parameters(self, head_dim: int, num_heads: int, num_kv_heads: int) -> Parameters:
        """The weights for `num_heads` of queries and `num_kv_heads` of keys; 0: no keys are made."""
        sizes = (num_heads, num_kv_heads) if self.norms_all_heads else (1, min(1, num_kv_heads))
        for name, heads in zip(("q_norm", "k_norm"), sizes, strict=True):
            if heads:
                yield from norm_parameters(f"attention.{name}", self.qk_norm, heads * head_dim)


class Positions(Trait, frozen=True, array_like=True):
    """How queries and keys depend on their positions."""

    words: ClassVar[Mapping[str, str]] = {"query_scale": "scale of queries by position"}

    rope: Rope | None = None
    query_scale: QueryScale | None = None


class Mask(Trait, frozen=True, array_like=True):
    """The tokens that a token attends to."""

    words: ClassVar[Mapping[str, str]] = {"chunked": "attention in chunks"}

    window: int | None = None
    """A token sees itself and the window - 1 tokens before it; None: all tokens before it."""
    chunked: bool = False
    """Whether `window` is the size of chunks: a token sees the tokens of its own chunk (Llama 4)."""


class Score(Trait, frozen=True, array_like=True):
    """What becomes of a product of a query and a key before softmax."""

    words: ClassVar[Mapping[str, str]] = {"sinks": "attention sinks"}

    scale: float
    softcap: float | None = None
    """scores = softcap * tanh(scores / softcap)"""
    sinks: bool = False
    """Whether each head has a learned score of a key without a value, which every token sees (gpt-oss)."""

    def parameters(self, num_heads: int) -> Parameters:
        """The learned scores."""
        if self.sinks:
            yield "attention.sinks.bias", (num_heads,)


class KV(Trait, frozen=True, array_like=True):
    """Where keys and values are cached."""

    kv_source: int | None = None
    """The layer whose cached keys and values this layer reads. It then projects and stores none (Gemma 4)."""


class GQA(Attention, frozen=True, array_like=True, tag=True):
    """Grouped-query attention. Multi-head and multi-query attention are its extreme cases."""

    projections: Projections
    score: Score
    positions: Positions = Positions()
    mask: Mask = Mask()
    norms: HeadNorms = HeadNorms()
    kv: KV = KV()

    @property
    def num_kv_heads(self) -> int:
        """See `Attention.num_kv_heads`."""
        return self.projections.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of a head of queries and keys."""
        return self.projections.head_dim

    @property
    def window(self) -> int | None:
        """See `Attention.window`."""
        return self.mask.window

    @property
    def kv_source(self) -> int | None:
        """See `Attention.kv_source`."""
        return self.kv.kv_source

    @property
    def value_head_dim(self) -> int:
        """Elements of a value head."""
        return self.head_dim if self.projections.value_size is None else self.projections.value_size

    @property
    def key_dim(self) -> int:
        """Elements of a cached key in one head."""
        return self.head_dim

    @property
    def multiplications_per_pair(self) -> int:
        """Multiplications of one query with one key and its value, over all heads."""
        return self.num_heads * (self.head_dim + self.value_head_dim)

    @property
    def num_launches(self) -> int:
        """Norm, projection, rotation, attention, output."""
        return 5 + (self.norms.qk_norm is not None)

    def parameters(self, hidden_size: int) -> Parameters:
        """See `Attention.parameters`."""
        linears, stored = self.projections, 0 if self.kv_source is not None else self.num_kv_heads
        inputs = 2 * hidden_size if linears.reads_token else hidden_size
        yield from linear_parameters("attention.q", self.query_rows, inputs, linears.qkv_bias)
        if stored:
            yield from linear_parameters("attention.k", stored * self.head_dim, inputs, linears.qkv_bias)
        if stored and not linears.value_is_key:
            yield from linear_parameters("attention.v", stored * self.value_head_dim, inputs, linears.qkv_bias)
        yield from self.norms.parameters(self.head_dim, self.num_heads, stored)
        yield from self.score.parameters(self.num_heads)
        yield from linear_parameters("attention.o", hidden_size, self.output_size, linears.output_bias)

    @property
    def query_rows(self) -> int:
        """Rows of the projection of queries, and of the gates of outputs."""
        return self.num_heads * self.head_dim * (1 + self.projections.output_gate)

    def split_heads(self, ranks: int) -> tuple[Span, ...]:
        """See `Attention.split_heads`. Ranks get the query heads of whole KV heads, or share a KV head."""
        return tuple(share.heads for share in split_heads(self.num_heads, self.num_kv_heads, ranks))

    def split(self, part: str, rank: int, ranks: int) -> Span | None:
        """See `Attention.split`."""
        share = split_heads(self.num_heads, self.num_kv_heads, ranks)[rank]
        if part == "attention.q":
            return share.heads.scaled(self.query_rows // self.num_heads)
        if part == "attention.k":
            return share.kv_heads.scaled(self.head_dim)
        if part == "attention.v":
            return share.kv_heads.scaled(self.value_head_dim)
        return share.heads if part == "attention.sinks" else super().split(part, rank, ranks)

    def kv_parts(self, num_kv_heads: int, num_blocks: int, block_size: int, dtype: KVDType) -> tuple[KVPart, ...]:
        """Keys and values, [num_blocks, num_kv_heads, block_size, head_dim] each.

        A back end orders the elements of a page. One-byte types add scales [num_blocks, num_kv_heads, block_size] for
        both.
        """
        tokens = (num_blocks, num_kv_heads, block_size)
        scales = (KVPart(tokens, "float32"),) * 2 if DTYPE_BYTES[dtype] == 1 else ()
        return (KVPart((*tokens, self.head_dim), dtype), KVPart((*tokens, self.value_head_dim), dtype), *scales)
