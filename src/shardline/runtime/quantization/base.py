"""What the file of a quantization scheme offers, and how it is found: by its name.

A scheme turns a weight in the activations' dtype into something that multiplies. Ranks split outputs, so a weight may
be any slice of rows of the whole: a row's packed bits must follow from that row alone. A scheme's bytes are counted by
`models.sizes`, from the `WeightFormat` of the same name.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import torch
from torch import Tensor

from shardline.runtime.ops.activation import ActivationName
from shardline.runtime.ops.experts import ExpertWeights
from shardline.runtime.ops.grouped_weight import GroupedWeight
from shardline.runtime.ops.linear_input import InputForm, LinearInput


class PackedLinear(Protocol):
    """A weight [out_features, in_features], ready to multiply."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    @property
    def takes(self) -> InputForm:
        """What x may be besides a tensor."""

    def __call__(self, x: LinearInput, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [M, in_features] times the transpose, plus bias: [M, out_features] of `out_dtype` (default: x's).

        An output's bits depend on its row of x and its row of the weight only.
        """


class PackedLMHead(PackedLinear, Protocol):
    """The output embedding [vocab, hidden_size]."""

    def argmax(self, x: LinearInput, bias: Tensor | None = None) -> Tensor:
        """Of each row's fp32 outputs the largest and the bits of its column, see `ops.linear_argmax`: [M, 2]."""


class PackedGatedLinear(Protocol):
    """Weights gate and up [out_features, in_features], ready to multiply the same rows."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    @property
    def takes(self) -> InputForm:
        """See `PackedLinear`."""

    def __call__(self, x: LinearInput, bias: Tensor | None, activation: ActivationName) -> Tensor:
        """act(x gate^T + bias[:out_features]) * (x up^T + bias[out_features:]): [M, out_features] of x's dtype.

        Rounded as `ops.gated_linear` says.
        """


class Quantization(Protocol):
    """What the module of a scheme offers."""

    def pack(self, *parts: Tensor | GroupedWeight) -> PackedLinear:
        """A linear weight of a layer, in parts [*, in_features], one under another; only w4a16 is given what a
        checkpoint has packed."""

    def pack_gated(self, gate: Tensor | GroupedWeight, up: Tensor | GroupedWeight) -> PackedGatedLinear:
        """Both weights [out_features, in_features] of a gated feed-forward block's first half."""

    def allocate_experts(self, num_experts: int, *parts: Tensor) -> ExpertWeights:
        """Room for the same linear of several experts, of which one has these parts, where they lie."""

    def pack_expert(self, experts: ExpertWeights, index: int, *parts: Tensor) -> None:
        """Put one expert's weight, in parts [*, in_features], in its place."""

    def pack_lm_head(self, weight: Tensor) -> PackedLMHead:
        """The output embedding [vocab, hidden_size], which some schemes hold more precisely."""


def quantization(name: str | None) -> Quantization:
    """The scheme of a weight format's name; "plain" or None: weights as they are."""
    module = "none" if name in (None, "plain") else name
    return cast(Quantization, importlib.import_module(f"shardline.runtime.quantization.{module}"))
