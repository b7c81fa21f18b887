"""What the file of a weight format offers, and how it is found: by its name."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import msgspec

from shardline.weights import formats
from shardline.weights.rows import InputForm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardline.runtime.backends.base import Kernels
    from shardline.weights.rows import LinearInput

Role = Literal["layer", "expert", "lm_head"]
"""What a weight is for: a format may hold some of them in another way."""


class FormatChoice(msgspec.Struct, frozen=True):
    """The format of a model's linear weights, as a deployment names it."""

    name: str = "plain"
    group_size: int = 0
    """Columns that share a scale, where the checkpoint decides it; 0: the whole row, or the format's own."""

    def open_format(self) -> WeightFormat:
        """What the format's file offers."""
        module = importlib.import_module(f"{formats.__name__}.{self.name}")
        return cast(WeightFormat, module.Format(self.group_size))


PLAIN = FormatChoice()
"""Weights in the activations' dtype."""


class PackedLinear(ABC):
    """A weight [out_features, in_features], ready to multiply."""

    input_form: ClassVar[InputForm] = "tensor"
    """What x should be; a tensor always works."""
    out_features: int

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held, padding included."""

    @abstractmethod
    def __call__(self, x: LinearInput, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [M, in_features] times the transpose, plus bias: [M, out_features] of `out_dtype` (default: x's).

        An output's bits depend on its row of x and its row of the weight only.

        Raises:
            ValueError: x has another number of features.
        """

    def argmax(self, x: LinearInput, bias: Tensor | None = None) -> Tensor:
        """[M, 2] float32: the largest fp32 output of each row, beside the bits of its column as int32.

        The lowest column wins ties; NaN loses to everything else. Only an lm_head is asked for this.
        """
        raise AssertionError(f"{type(self).__name__} is no lm_head")


class PackedGatedLinear(ABC):
    """The weights gate and up [out_features, in_features], ready to multiply the same rows."""

    input_form: ClassVar[InputForm] = "tensor"

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held, padding included."""

    @abstractmethod
    def __call__(self, x: LinearInput, bias: Tensor | None, activation: str) -> Tensor:
        """act(x gate^T + bias[:out_features]) * (x up^T + bias[out_features:]): [M, out_features] of x's dtype.

        A back end rounds once, or as one linear followed by `ops.activation.gated_activation`.
        """


@dataclass(frozen=True)
class PackedExperts:
    """The same linear [out_features, in_features] of E experts, each packed as for one linear."""

    panels: Tensor
    """[E, ...]: a weight's packed values, laid out as the back end's kernels read them."""
    scales: Tensor | None
    """[E, ...] float32: scales of the outputs of quantized weights."""
    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return self.panels.nbytes + (0 if self.scales is None else self.scales.nbytes)


@dataclass(frozen=True)
class WeightFormat(ABC):
    """One way of holding linear weights.

    Ranks split outputs, so a weight may be any slice of rows of the whole: a row's packed bytes must follow from that
    row alone. Weights are handed over in parts [*, in_features], one under another: tensors in the activations' dtype,
    perhaps in a mapped file and with strided rows.
    """

    group_size: int = 0
    """As in FormatChoice."""

    reads_packed: ClassVar[bool] = False
    """Whether layers keep the weights that a checkpoint has packed, in groups of columns, instead of dense ones."""
    gpu_capability: ClassVar[int | None] = None
    """The first GPU architecture that has the format, as in sm_89; 0: any GPU; None: the CPU has it too."""
    alternatives: ClassVar[str] = "int8"
    """Formats to name to a user whose device lacks this one."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The format's part of a `system_fingerprint`."""

    def is_dense(self, role: Role) -> bool:
        """Whether weights of this role are held in the activations' dtype."""
        return False

    @abstractmethod
    def num_bytes(self, rows: int, columns: int, dtype_bytes: int, role: Role = "layer") -> int:
        """Bytes of a weight [rows, columns], without padding; `dtype_bytes`: of an activation."""

    @abstractmethod
    def pack_linear(self, kernels: Kernels, *parts: Tensor) -> PackedLinear:
        """A weight of a layer."""

    @abstractmethod
    def pack_gated(self, kernels: Kernels, gate: Tensor, up: Tensor) -> PackedGatedLinear:
        """The two weights of a gated feed-forward block's first half."""

    @abstractmethod
    def pack_lm_head(self, kernels: Kernels, weight: Tensor) -> PackedLinear:
        """The output embedding [vocab, hidden_size]; some formats hold it more precisely. It has `argmax`."""

    @abstractmethod
    def allocate_experts(self, kernels: Kernels, num_experts: int, *parts: Tensor) -> PackedExperts:
        """Room for the same linear of several experts; `parts` are those of one of them."""

    @abstractmethod
    def pack_expert(self, kernels: Kernels, experts: PackedExperts, index: int, *parts: Tensor) -> None:
        """Pack one expert's weight into its place."""

    @abstractmethod
    def multiply_reference(
        self, kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """The oracle: what a packed `weight` [N, K] gives for x [M, K], in plain torch, exact or in fp64 until the last
        rounding. `kernels` may only be used to pack, where packing searches for scales."""


def weight_format(name: str) -> WeightFormat:
    """The format of this name, with the group size that it has by itself."""
    return FormatChoice(name).open_format()
