"""Latent attention, see `attention.Attention`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from shardline.models.attention import Attention, AttentionWork, Positions, Score, cached_token_bytes
from shardline.models.indexer import Indexer
from shardline.models.partition import Span, split_dim
from shardline.models.parts import (
    DTYPE_BYTES,
    KVDType,
    KVPart,
    Norm,
    Parameters,
    Trait,
    linear_parameters,
    norm_parameters,
)


class LatentProjections(Trait, frozen=True, array_like=True):
    """The linears down to latents, norms over the latents, and the linears from there up to heads."""

    kv_lora_rank: int
    nope_head_dim: int
    """Size of the part of a query and key head that is not rotated."""
    rope_head_dim: int
    """Size of the rotated part. All heads share the key's rotated part."""
    value_head_dim: int
    kv_norm: Norm
    """Norm over the latent."""
    q_lora_rank: int | None = None
    """None: queries are projected directly."""
    q_norm: Norm | None = None
    """Norm over the queries' latent. It exists if and only if q_lora_rank is set."""
    bias: bool = False
    """Whether the projections down to the latents and the output projection have a bias."""

    @property
    def query_head_dim(self) -> int:
        """Elements of one projected query head."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Elements cached per token: the latent, then the rotated part of the key."""
        return self.kv_lora_rank + self.rope_head_dim

    @property
    def up_head_dim(self) -> int:
        """Rows of kv_up for one head: those of the key's part that is not rotated, then those of the value."""
        return self.nope_head_dim + self.value_head_dim

    def parameters(self, num_heads: int, hidden_size: int) -> Parameters:
        """See `Attention.parameters`."""
        q_size = num_heads * self.query_head_dim
        if self.q_lora_rank is None:
            yield from linear_parameters("attention.q", q_size, hidden_size)
        else:
            yield from linear_parameters("attention.q_down", self.q_lora_rank, hidden_size, self.bias)
            yield from norm_parameters("attention.q_norm", self.q_norm, self.q_lora_rank)
            yield from linear_parameters("attention.q_up", q_size, self.q_lora_rank)
        yield from linear_parameters("attention.kv_down", self.latent_dim, hidden_size, self.bias)
        yield from norm_parameters("attention.kv_norm", self.kv_norm, self.kv_lora_rank)
        yield from linear_parameters("attention.kv_up", num_heads * self.up_head_dim, self.kv_lora_rank)
        yield from linear_parameters("attention.o", hidden_size, num_heads * self.value_head_dim, self.bias)

    def split_down(self, part: str, rank: int, ranks: int) -> Span:
        """One rank's rows of q_down or kv_down. They are split like one weight with q_down's rows first."""
        q_rank = self.q_lora_rank or 0
        rows = split_dim(q_rank + self.latent_dim, ranks)[rank]
        if part == "attention.q_down":
            return Span(min(rows.start, q_rank), min(rows.stop, q_rank))
        return Span(max(rows.start - q_rank, 0), max(rows.stop - q_rank, 0))


class MLA(Attention, frozen=True, array_like=True, tag=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one latent per token is key and value of all heads.

    It always uses the absorbed form, which applies the up-projections of keys and values to queries and outputs. So the
    cache holds [kv_lora_rank + rope_head_dim] per token, and prefill and decode give the same bits.
    """

    shares_cache: ClassVar[bool] = True
    words: ClassVar[Mapping[str, str]] = {"indexer": "attention to chosen tokens"}

    projections: LatentProjections
    score: Score
    """Its scale has YaRN's mscale folded in."""
    positions: Positions
    indexer: Indexer | None = None
    """None: a token sees all tokens before it."""

    @property
    def value_head_dim(self) -> int:
        """Elements of a value head."""
        return self.projections.value_head_dim

    @property
    def num_chosen(self) -> int:
        """See `Attention.num_chosen`."""
        return 0 if self.indexer is None else self.indexer.top_k

    @property
    def reads_choice(self) -> bool:
        """See `Attention.reads_choice`."""
        return self.indexer is not None and self.indexer.is_shared

    @property
    def key_dim(self) -> int:
        """Elements of a cached key."""
        return self.projections.latent_dim

    @property
    def latent_sizes(self) -> tuple[int, ...]:
        """See `Attention.latent_sizes`."""
        linears = self.projections
        return linears.q_lora_rank or 0, linears.kv_lora_rank, linears.rope_head_dim

    @property
    def partial_size(self) -> int:
        """See `Attention.partial_size`. Outputs have the dims of the latents."""
        return self.num_heads * (2 + self.projections.kv_lora_rank)

    def absorbed_size(self, ranks: int) -> int:
        """See `Attention.absorbed_size`."""
        return -(-self.num_heads // ranks) * self.projections.up_head_dim * self.projections.kv_lora_rank

    @property
    def multiplications_per_pair(self) -> int:
        """Multiplications of one query with one latent, over all heads."""
        return self.num_heads * (self.key_dim + self.projections.kv_lora_rank)

    @property
    def num_launches(self) -> int:
        """Norm, down, norms, up, absorption, rotation, attention, merge, values, output; an indexer has more."""
        return 10 + (0 if self.indexer is None else 6)

    def parameters(self, hidden_size: int) -> Parameters:
        """See `Attention.parameters`."""
        yield from self.projections.parameters(self.num_heads, hidden_size)
        if self.indexer is not None:
            yield from self.indexer.parameters(self.projections.q_lora_rank or hidden_size, hidden_size)

    def split_heads(self, ranks: int) -> tuple[Span, ...]:
        """See `Attention.split_heads`. Heads are split as evenly as possible, since all of them share one latent."""
        if ranks > self.key_dim:
            raise ValueError(f"{ranks} ranks cannot share a latent of {self.key_dim} elements")
        return super().split_heads(ranks)

    def split(self, part: str, rank: int, ranks: int) -> Span | None:
        """See `Attention.split`."""
        linears = self.projections
        if part.startswith("attention.indexer"):  # every rank has all of it
            return None
        if part in ("attention.q_down", "attention.kv_down"):
            return linears.split_down(part, rank, ranks)
        heads = self.split_heads(ranks)[rank]
        if part == "attention.kv_up":
            return heads.scaled(linears.up_head_dim)
        if part == ("attention.q" if linears.q_lora_rank is None else "attention.q_up"):
            return heads.scaled(linears.query_head_dim)
        return super().split(part, rank, ranks)

    def kv_parts(self, num_kv_heads: int, num_blocks: int, block_size: int, dtype: KVDType) -> tuple[KVPart, ...]:
        """Latents [num_blocks, block_size, latent_dim], the same for every `num_kv_heads`.

        With a one-byte type, their rotated part is a tensor of its own in bfloat16, and there is a scale [num_blocks,
        block_size]. The keys of the indexer come last.
        """
        tokens, linears = (num_blocks, block_size), self.projections
        indexer = () if self.indexer is None else self.indexer.kv_parts(num_blocks, block_size, dtype)
        if DTYPE_BYTES[dtype] > 1:
            return KVPart((*tokens, linears.latent_dim), dtype), *indexer
        return (
            KVPart((*tokens, linears.kv_lora_rank), dtype),
            KVPart((*tokens, linears.rope_head_dim), "bfloat16"),
            KVPart(tokens, "float32"),
            *indexer,
        )

    def work(self, ranks: int, dtype: KVDType, *, expands: bool = False) -> Iterator[AttentionWork]:
        """See `Attention.work`."""
        absorbed = 2 * self.multiplications_per_pair / ranks
        expanded = 2 * self.num_heads * (self.projections.query_head_dim + self.value_head_dim) / ranks
        num_bytes = cached_token_bytes(self, ranks, dtype)
        if self.indexer is None:
            yield AttentionWork(None, num_bytes, absorbed, expanded if expands else absorbed)
            return
        # Prompts compute in the dims of the latent too.
        keys = sum(part.num_bytes for part in self.indexer.kv_parts(1, 1, dtype))
        yield self.indexer.work(keys)
        yield AttentionWork(self.indexer.top_k, num_bytes - keys, absorbed, absorbed)
