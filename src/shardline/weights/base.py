"""What the file of a weight format offers. The file is found by the format's name."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, cast

import msgspec

from shardline.kernels.tensors import InputForm
from shardline.weights import formats

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardline.kernels.contract import Kernels
    from shardline.kernels.tensors import LinearInput
    from shardline.weights.grouped import GroupedWeight

Role = Literal["layer", "key_value", "attention", "down", "expert", "lm_head"]
"""What a weight is for; a format may hold weights of different roles in different ways. Errors in "key_value", the
projections to keys, values or latents, cost most, then those in "down", which closes a dense feed-forward block, and in
"attention", the projections to queries and of attention's output."""


class FormatChoice(msgspec.Struct, frozen=True):
    """The format of a model's linear weights, as a deployment names it."""

    name: str = "plain"
    group_size: int = 0
    """Number of columns that share a scale, if the checkpoint decides it; 0: the whole row, or the format's own group
    size."""
    bits: float = 4
    """Bits of a code, if the checkpoint decides it; the mean if its weights differ."""
    group_bytes: float = 3
    """Bytes of a group's scale, min and zero point, if the checkpoint decides it."""
    packs_all: bool = False
    """Whether experts and the lm_head stay as the checkpoint packs them too."""

    def open_format(self) -> WeightFormat:
        """An instance of the `Format` class in the format's file."""
        module = importlib.import_module(f"{formats.__name__}.{self.name}")
        return cast(WeightFormat, module.Format(self.group_size, self.bits, self.group_bytes, self.packs_all))


PLAIN = FormatChoice()
"""Weights in the activations' dtype."""


class PackedLinear(ABC):
    """A weight [out_features, in_features], ready to multiply."""

    input_form: InputForm = "tensor"
    """The form in which it reads x best; a tensor always works."""
    out_features: int

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held, padding included."""

    @abstractmethod
    def __call__(self, x: LinearInput, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [M, in_features] times the transpose, plus bias: [M, out_features] of `out_dtype` (default: x's).

        An output's bits depend only on its row of x and its row of the weight.

        Raises:
            ValueError: x has another number of features.
        """

    def row_reader(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
        """A function that returns rows of the weight by indices [R], as [R, in_features] of `dtype`, with the bits
        of the checkpoint's weight rounded once; None if they cannot be had from what is held. A tied embedding need
        then not be held twice."""
        return None

    def argmax(self, x: LinearInput, bias: Tensor | None = None, allowed: Tensor | None = None) -> Tensor:
        """[M, 2] float32: the largest fp32 output of each row, and the bits of its column as int32.

        The lowest column wins ties; NaN loses to everything else. Only an lm_head supports this. `allowed`
        [M, ceil(out_features / 64)] int64: the bits of the columns that each row may choose from; outputs of all other
        columns count as -inf.
        """
        raise AssertionError(f"{type(self).__name__} is not an lm_head")


class PackedGatedLinear(ABC):
    """The gate and up weights, [out_features, in_features] each, ready to multiply the same rows."""

    input_form: InputForm = "tensor"

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held, padding included."""

    @abstractmethod
    def __call__(self, x: LinearInput, bias: Tensor | None, activation: str) -> Tensor:
        """act(x gate^T + bias[:out_features]) * (x up^T + bias[out_features:]): [M, out_features] of x's dtype.

        The CPU's back end rounds once. GPUs round like one linear followed by `ops.activation.gated_activation`.
        """


class ExpertRounding(NamedTuple):
    """How the rows of E experts are rounded to e4m3."""

    scales: Tensor
    """[E] float32: see `GroupedWeight.input_scale`."""
    bound: float
    """See `GroupedWeight.input_bound`."""


class GroupScales(NamedTuple):
    """What belongs to the codes of E experts, if columns share scales in groups."""

    scales: Tensor
    mins: Tensor | None
    zeros: Tensor | None
    table: Tensor | None
    group_size: int
    order: Tensor | None = None
    """[E, in_features] int32: the column of x that belongs to each packed column; None: the same."""
    rounding: ExpertRounding | None = None
    """How x is rounded before the product; None: it is not."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in (self.scales, self.mins, self.zeros, self.order) if part is not None)


class RotatedScales(NamedTuple):
    """The scales of E experts whose products read rows with mixed parts; see `weights.rotation`."""

    scales: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.scales.nbytes


@dataclass(frozen=True)
class PackedExperts:
    """One linear [out_features, in_features] for each of E experts, each packed like a single linear."""

    panels: Tensor
    """[E, ...]: the packed values of each weight, in the layout that the back end's kernels read."""
    scales: Tensor | RotatedScales | GroupScales | None
    """[E, ...] float32: the scales of the outputs, for quantized weights; those of groups; None for plain weights."""
    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return self.panels.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def takes_expert(self, other: PackedExperts) -> bool:
        """Whether the only expert of `other` can be one of these: all experts of a layer share the table of codes."""
        own, others = self.scales, other.scales
        if not isinstance(own, GroupScales) or own.table is None:
            return True
        return isinstance(others, GroupScales) and others.table is not None and own.table.equal(others.table)

    def copy_expert(self, index: int, other: PackedExperts) -> None:
        """Put the only expert of `other`, which `takes_expert` accepts, in the place `index`."""
        own, others = self.scales, other.scales
        pairs: list[tuple[Tensor | None, Tensor]] = [(self.panels, other.panels)]
        if isinstance(own, GroupScales):
            assert isinstance(others, GroupScales)
            pairs += [(getattr(own, name), getattr(others, name)) for name in ("scales", "mins", "zeros", "order")]
            if own.rounding is not None and others.rounding is not None:
                pairs.append((own.rounding.scales, others.rounding.scales))
        elif isinstance(own, RotatedScales):
            assert isinstance(others, RotatedScales)
            pairs.append((own.scales, others.scales))
        elif own is not None:
            assert others is not None
            assert not isinstance(others, GroupScales | RotatedScales)
            pairs.append((own, others))
        for to, source in pairs:
            if to is not None:
                to[index].copy_(source[0])


@dataclass(frozen=True)
class WeightFormat(ABC):
    """One format of linear weights.

    Ranks split outputs, so a weight may be any slice of the whole weight's rows, and a row's packed bytes must depend
    only on that row. Weights are passed in parts [*, in_features], stacked in order. The parts are tensors in the
    activations' dtype; they may be views of a mapped file and have strided rows.
    """

    group_size: int = 0
    bits: float = 4
    group_bytes: float = 3
    packs_all: bool = False
    """These four are as in FormatChoice."""

    computes_in: ClassVar[str] = ""
    """What a GPU must compute in, see `deployment/generations.toml`; empty: in the activations' dtype."""
    gpu_cases: ClassVar[tuple[str, ...]] = ()
    """Its products on GPUs beside dense ones, see `deployment/kernel_cases.py`."""
    is_for_gpus: ClassVar[bool] = True
    """Whether GPUs support the format at all."""
    on_gpus: ClassVar[str] = ""
    """The format that this name stands for on GPUs, if they do not support the format itself."""
    is_for_torch: ClassVar[bool] = True
    """Whether the torch back end supports the format."""
    packs_embedding: ClassVar[bool] = False
    """Whether the embedding is held as the lm_head is, of which rows can be read."""
    takes_e4m3: ClassVar[bool] = False
    """Whether the format takes the e4m3 weights of a quantized checkpoint as they are."""
    folds_norms: ClassVar[bool] = False
    """Whether weights are read with norms folded into them, see `runtime.loader.folded_norms`."""
    alternatives: ClassVar[str] = "int8_fast"
    """Formats to suggest to a user whose GPU does not support this one."""

    @property
    def reads_packed(self) -> bool:
        """Whether layers keep weights that a checkpoint has packed, in groups of columns, instead of dequantizing
        them."""
        return False

    @property
    @abstractmethod
    def label(self) -> str:
        """The format's part of a `system_fingerprint`."""

    def is_dense(self, role: Role) -> bool:
        """Whether weights of this role are held in the activations' dtype."""
        return False

    def keeps(self, kernels: Kernels, parts: Sequence[GroupedWeight], role: Role) -> bool:
        """Whether the functions that pack accept such parts of a weight as the checkpoint has packed them; otherwise
        they are dequantized first."""
        return False

    def hold(self, kernels: Kernels, weight: Tensor, role: Role) -> Tensor | GroupedWeight:
        """A dense part of a layer's weight as the functions that pack take it: quantized already, if the format holds
        this role in more bits."""
        return weight

    @abstractmethod
    def num_bytes(self, rows: int, columns: int, dtype_bytes: int, role: Role = "layer") -> int:
        """Bytes of a weight [rows, columns], without padding; `dtype_bytes`: bytes of an activation."""

    @abstractmethod
    def pack_linear(self, kernels: Kernels, *parts: Tensor) -> PackedLinear:
        """Pack a weight of a layer."""

    @abstractmethod
    def pack_gated(self, kernels: Kernels, gate: Tensor, up: Tensor) -> PackedGatedLinear:
        """Pack the gate and up weights of a gated feed-forward block."""

    @abstractmethod
    def pack_lm_head(self, kernels: Kernels, weight: Tensor) -> PackedLinear:
        """Pack the output embedding [vocab, hidden_size]; some formats hold it with more precision. The result has
        `argmax`."""

    @abstractmethod
    def allocate_experts(self, kernels: Kernels, num_experts: int, *parts: Tensor) -> PackedExperts:
        """Memory for the same linear of several experts; `parts` are the parts of one expert's weight."""

    @abstractmethod
    def pack_expert(self, kernels: Kernels, experts: PackedExperts, index: int, *parts: Tensor) -> None:
        """Pack the weight of expert `index` into its place."""

    @abstractmethod
    def multiply_reference(
        self, kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """The oracle: the product of x [M, K] with a packed `weight` [N, K] in plain torch, exact or in fp64 until the
        last rounding. `kernels` may be used only for packing, if packing searches for scales."""


def weight_format(name: str) -> WeightFormat:
    """The format of this name, with its own group size."""
    return FormatChoice(name).open_format()
