"""Linear attention: a state of fixed size per request instead of keys and values per token."""

from __future__ import annotations

from collections.abc import Iterator

from shardline.models.attention import Attention, AttentionWork
from shardline.models.partition import Span
from shardline.models.parts import KVDType, KVPart, Parameters, linear_parameters


class LinearAttention(Attention, frozen=True, array_like=True, tag=True):
    """Gated delta rule (Yang et al., 2024), after a short causal convolution. `num_heads` are key heads."""

    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    """Tokens that the convolution sees."""

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_heads * self.key_head_dim + self.output_size

    @property
    def output_size(self) -> int:
        """Elements of all value heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def key_dim(self) -> int:
        """No key is cached."""
        return 0

    @property
    def multiplications_per_pair(self) -> int:
        """There are no pairs of tokens."""
        return 0

    @property
    def num_launches(self) -> int:
        """Norm, two projections, convolution, gates, delta rule, gated norm, output."""
        return 8

    def parameters(self, hidden_size: int) -> Parameters:
        """See `Attention.parameters`."""
        heads = self.num_value_heads
        yield from linear_parameters("attention.qkv", self.conv_size, hidden_size)
        yield from linear_parameters("attention.z", self.output_size, hidden_size)
        yield from linear_parameters("attention.beta", heads, hidden_size)
        yield from linear_parameters("attention.decay", heads, hidden_size)
        yield "attention.conv.weight", (self.conv_size, self.conv_width)
        yield "attention.decay_log.bias", (heads,)
        yield "attention.decay_offset.bias", (heads,)
        yield "attention.norm.weight", (self.value_head_dim,)
        yield from linear_parameters("attention.o", hidden_size, self.output_size)

    def split(self, part: str, rank: int, ranks: int) -> Span | None:
        """See `Attention.split`. A rank gets whole key heads, with their value heads."""
        rows = {
            **dict.fromkeys(("attention.qkv", "attention.conv"), self.conv_size),
            "attention.z": self.output_size,
            **{f"attention.{name}": self.num_value_heads for name in ("beta", "decay", "decay_log", "decay_offset")},
        }
        if part in rows:
            return self.split_heads(ranks)[rank].scaled(rows[part] // self.num_heads)
        return super().split(part, rank, ranks)

    def kv_parts(self, num_kv_heads: int, num_blocks: int, block_size: int, dtype: KVDType) -> tuple[KVPart, ...]:
        """Nothing is cached for each token."""
        return ()

    def work(self, ranks: int, dtype: KVDType, *, expands: bool = False) -> Iterator[AttentionWork]:
        """No cached token is read."""
        yield from ()

    def state_bytes(self, rank: int, ranks: int) -> int:
        """See `Attention.state_bytes`: float32 for the rule, bfloat16 for the convolution."""
        whole = 4 * self.output_size * self.key_head_dim + 2 * (self.conv_width - 1) * self.conv_size
        return whole * self.split_heads(ranks)[rank].size // self.num_heads
