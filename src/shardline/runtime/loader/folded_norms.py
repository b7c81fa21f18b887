"""Large weights of norms, moved into the weights that read the normed rows.

A product that quantizes its rows leaves few levels to most numbers of a row if some are many times larger. Where a norm
makes them so, a power of two moves from its weight to the columns that read them. These are often smaller than their
neighbours, so weights lose less too. It changes exponents only, so it is the same model, to the bit, until something is
quantized. SmoothQuant (arXiv 2211.10438) moves factors that samples of activations suggest. Here the norm alone
decides, so every rank finds the same factors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardline.kernels.memory import mapped_empty
from shardline.models.feed_forward import MoE
from shardline.models.mla import MLA
from shardline.models.parameters import parse_name
from shardline.models.parts import Norm
from shardline.models.sharding import Spans
from shardline.models.spec import DecoderSpec
from shardline.weights.grouped import GroupedWeight

_OF_ATTENTION = (
    *("attention.q", "attention.k", "attention.v", "attention.q_down", "attention.kv_down"),
    *("attention.z", "attention.beta", "attention.decay", "attention.step"),
)
"""The linears of attention that read its input."""
_OF_FEED_FORWARD = ("gate", "up", "router", "shared_gate", "latent_down")
"""The last words of those of a feed-forward block."""


class FoldedNorms:
    """A `weights.WeightSource` of another one's weights. The final norm stays as it is: an embedding tied to the
    lm_head, heads for drafts and embedded prompts read it too."""

    def __init__(
        self, spec: DecoderSpec, read: Callable[[str, Spans], Tensor], is_packed: Callable[[str], bool]
    ) -> None:
        """`read` and `is_packed`: `get` and `is_packed` of the other source."""
        self._spec = spec
        self._read, self._is_packed = read, is_packed
        self._factors: dict[str, Tensor | None] = {}

    def get(self, name: str, spans: Spans) -> Tensor:
        """See `WeightSource.get`."""
        part, (layer, module, kind) = self._read(name, spans), parse_name(name)
        if layer is None:
            return part
        norm = _folded_norm(self._spec, layer, module)
        if norm is not None:
            factors = self._factors_of(f"layers.{layer}.{module}", norm)
            if factors is None:
                return part
            offset = norm.weight_offset if kind == "weight" else 0.0
            return ((part.double() + offset) / factors - offset).to(part.dtype)
        factors = self.column_factors(name)
        if factors is None:
            return part
        columns = slice(None) if spans[1] is None else slice(spans[1].start, spans[1].stop)
        return torch.mul(part, factors[columns].to(part.dtype), out=mapped_empty(part.shape, part.dtype))

    def original(self, name: str, spans: Spans) -> Tensor:
        """As `get`, of the other source."""
        return self._read(name, spans)

    def get_packed(self, name: str, spans: Spans) -> GroupedWeight | None:
        """See `WeightSource.get_packed`: what is packed has other scales, so it is read dense."""

    def is_packed(self, name: str) -> bool:
        """See `WeightSource.is_packed`."""
        return self._is_packed(name)

    def column_factors(self, name: str) -> Tensor | None:
        """Factors [in_features] float32 of the columns of a weight; None: they are all 1."""
        layer, module, kind = parse_name(name)
        if layer is None or kind != "weight" or (before := _norm_before(self._spec, layer, module)) is None:
            return None
        norm = _folded_norm(self._spec, layer, before)
        return None if norm is None else self._factors_of(f"layers.{layer}.{before}", norm)

    def _factors_of(self, name: str, norm: Norm) -> Tensor | None:
        if name not in self._factors:
            self._factors[name] = fold_factors(self._read(f"{name}.weight", (None,)), norm.weight_offset)
        return self._factors[name]


def fold_factors(weight: Tensor, offset: float) -> Tensor | None:
    """What the channels of a norm are divided by, powers of two [hidden_size] in float32; None: nothing.

    A channel of at least twice the median magnitude comes between the median and its double, if the weight's dtype
    holds what is left; that may fail only with an offset.
    """
    sizes = (weight.double() + offset).abs()
    ratios = sizes / sizes.median()
    exponents = torch.where(ratios.isfinite(), torch.frexp(ratios).exponent - 1, 0).clamp_(0, 64)
    factors = (exponents.int() + 127 << 23).view(torch.float32)
    left = (weight.double() + offset) / factors - offset
    factors[left != left.to(weight.dtype).double()] = 1.0
    return factors if bool((factors > 1).any()) else None


def _folded_norm(spec: DecoderSpec, layer: int, module: str) -> Norm | None:
    """The norm of this name if linears alone read it; None: they do not, or there is no such norm."""
    own = spec.layers[layer]
    is_latent = module == "attention.q_norm" and isinstance(own.attention, MLA)
    if module in ("attention_norm", "feed_forward_norm", "feed_forward.experts_norm") or is_latent:
        return own.norm_of(module)
    return None


def _norm_before(spec: DecoderSpec, layer: int, module: str) -> str | None:
    """The norm that a linear reads; None: it reads something else."""
    own = spec.layers[layer]
    if module in _OF_ATTENTION:
        return "attention_norm"
    if module == "attention.q_up":
        return "attention.q_norm"
    if not module.startswith("feed_forward.") or module.rpartition(".")[2] not in _OF_FEED_FORWARD:
        return None
    if isinstance(own.feed_forward, MoE) and own.feed_forward.own_norms is not None and ".shared." not in module:
        return "feed_forward.experts_norm" if ".experts." in module else None
    if isinstance(own.feed_forward, MoE) and own.feed_forward.latent is not None and ".experts." in module:
        return None
    return "attention_norm" if own.parallel else "feed_forward_norm"
