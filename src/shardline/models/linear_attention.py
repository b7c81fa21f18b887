"""Linear attention: a state of fixed size per request instead of keys and values per token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from shardline.models.attention import Attention, AttentionWork
from shardline.models.partition import Span
from shardline.models.parts import DTYPE_BYTES, DType, KVDType, KVPart, Norm, Parameters, linear_parameters


class StateSizes(NamedTuple):
    """Sizes of what a rank keeps of a request."""

    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    """The state of each head is [key_head_dim, value_head_dim] float32."""
    num_recent: int
    num_channels: int
    """What the convolution sees of the last tokens is [num_recent, num_channels], in the activations' dtype."""

    def num_bytes(self, dtype: DType) -> int:
        """Bytes of a request, for activations of `dtype`."""
        state = 4 * self.num_value_heads * self.key_head_dim * self.value_head_dim
        return state + DTYPE_BYTES[dtype] * self.num_recent * self.num_channels


class LinearAttention(Attention, frozen=True, array_like=True, tag=True):
    """Gated delta rule (Yang et al., arXiv 2412.06464), after a short causal convolution. `num_heads` are key heads."""

    keeps_state: ClassVar[bool] = True

    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    """Tokens that the convolution sees."""
    norm: Norm
    """Over the output of each value head, before its gate."""

    def special_needs(self) -> Iterator[tuple[str, str]]:
        """See `Part.special_needs`."""
        yield "states", "states of requests"

    @property
    def key_size(self) -> int:
        """Elements of all keys."""
        return self.num_heads * self.key_head_dim

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
        sizes = {"q": self.key_size, "k": self.key_size, "v": self.output_size}
        for name, size in sizes.items():
            yield from linear_parameters(f"attention.{name}", size, hidden_size)
        yield from linear_parameters("attention.z", self.output_size, hidden_size)
        yield from linear_parameters("attention.beta", heads, hidden_size)
        yield from linear_parameters("attention.decay", heads, hidden_size)
        for name, size in sizes.items():
            yield f"attention.{name}_conv.weight", (size, self.conv_width)
        yield "attention.decay_log.bias", (heads,)
        yield "attention.decay_offset.bias", (heads,)
        yield "attention.norm.weight", (self.value_head_dim,)
        yield from linear_parameters("attention.o", hidden_size, self.output_size)

    def split(self, part: str, rank: int, ranks: int) -> Span | None:
        """See `Attention.split`. A rank gets whole key heads, with their value heads."""
        rows = {
            **dict.fromkeys(("q", "k", "q_conv", "k_conv"), self.key_size),
            **dict.fromkeys(("v", "z", "v_conv"), self.output_size),
            **dict.fromkeys(("beta", "decay", "decay_log", "decay_offset"), self.num_value_heads),
        }.get(part.removeprefix("attention."))
        if rows is not None:
            return self.split_heads(ranks)[rank].scaled(rows // self.num_heads)
        return None if part == "attention.norm" else super().split(part, rank, ranks)

    def kv_parts(self, num_kv_heads: int, num_blocks: int, block_size: int, dtype: KVDType) -> tuple[KVPart, ...]:
        """Nothing is cached for each token."""
        return ()

    def work(self, ranks: int, dtype: KVDType, *, expands: bool = False) -> Iterator[AttentionWork]:
        """No cached token is read."""
        yield from ()

    def state_sizes(self, rank: int, ranks: int) -> StateSizes:
        """The sizes of the state of one request on a rank."""
        heads = self.split_heads(ranks)[rank].size
        values = heads * self.num_value_heads // self.num_heads
        channels = 2 * heads * self.key_head_dim + values * self.value_head_dim
        return StateSizes(values, self.key_head_dim, self.value_head_dim, self.conv_width - 1, channels)

    def state_bytes(self, rank: int, ranks: int, dtype: DType = "bfloat16") -> int:
        """See `Attention.state_bytes`."""
        return self.state_sizes(rank, ranks).num_bytes(dtype)
