"""Mamba-2 (Dao and Gu, arXiv 2405.21060) as linear attention: its groups are key heads, and a group's B and C are keys
and queries of its heads."""

from __future__ import annotations

from shardline.models.linear_attention import LinearAttention
from shardline.models.partition import Span
from shardline.models.parts import Parameters, linear_parameters


class Mamba2(LinearAttention, frozen=True, array_like=True, tag=True):
    """Mamba-2 after a short causal convolution. The norm is over all heads of a group, behind their gates."""

    conv_bias: bool = True

    def parameters(self, hidden_size: int) -> Parameters:
        """See `Attention.parameters`."""
        heads = self.num_value_heads
        sizes = {"q": self.key_size, "k": self.key_size, "v": self.output_size}
        for name, size in (*sizes.items(), ("z", self.output_size), ("step", heads)):
            yield from linear_parameters(f"attention.{name}", size, hidden_size)
        for name, size in sizes.items():
            yield f"attention.{name}_conv.weight", (size, self.conv_width)
            if self.conv_bias:
                yield f"attention.{name}_conv.bias", (size,)
        for name in ("decay_log", "decay_offset", "skip"):
            yield f"attention.{name}.bias", (heads,)
        yield "attention.norm.weight", (self.output_size,)
        yield from linear_parameters("attention.o", hidden_size, self.output_size)

    def split(self, part: str, rank: int, ranks: int) -> Span | None:
        """See `LinearAttention.split`."""
        like = "attention.decay" if part in ("attention.skip", "attention.step") else part
        return super().split(like, rank, ranks)
