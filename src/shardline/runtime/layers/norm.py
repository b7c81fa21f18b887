"""RMSNorm and LayerNorm layers. Every rank normalises whole rows."""

from __future__ import annotations

from torch import Tensor

from shardline.kernels.tensors import InputForm, LinearInput
from shardline.models.parts import Norm
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.ops.add import add
from shardline.runtime.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm


class NormLayer:
    """A norm over the last dimension."""

    def __init__(self, loader: LayerLoader, name: str, norm: Norm) -> None:
        self._kernels = loader.stage.kernels
        self._spec = norm
        self._offset = norm.kernel_offset
        self.weight = loader.load(f"{name}.weight")
        self._bias = loader.load(f"{name}.bias") if norm.bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[M, H] or heads [T, N, H] -> the same, contiguous."""
        spec = self._spec
        if spec.kind == "rms":
            return rms_norm(self._kernels, x, self.weight, spec.eps, weight_offset=self._offset)
        return layer_norm(self._kernels, x, self.weight, self._bias, spec.eps)


class NoNorm:
    """The residual addition before linears that read the sum without a norm; called like `InputNorm`."""

    def __init__(self, loader: LayerLoader) -> None:
        self._kernels = loader.stage.kernels

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[LinearInput, Tensor]:
        """(s, s) for s = x + residual, or s = x without a residual."""
        summed = x if residual is None else add(self._kernels, x, residual)
        return summed, summed


class InputNorm:
    """The norm before linears, in the form that they read, fused with the residual addition before it."""

    def __init__(self, loader: LayerLoader, name: str, norm: Norm, *, input_form: InputForm) -> None:
        """`input_form`: the form that the linears read; only they read the norm."""
        self._kernels = loader.stage.kernels
        self.spec = norm
        self._offset = norm.kernel_offset
        self.weight = loader.load(f"{name}.weight")
        self._bias = loader.load(f"{name}.bias") if norm.bias else None
        self._is_quantized = input_form == "quantized"

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[LinearInput, Tensor]:
        """(norm(s), s), all [M, H]. s = x + residual, rounded to the activations' dtype before the norm; without a
        residual, s = x."""
        spec, kernels, quantized = self.spec, self._kernels, self._is_quantized
        if spec.kind == "rms":
            return add_rms_norm(
                kernels, x, residual, self.weight, spec.eps, weight_offset=self._offset, quantized=quantized
            )
        return add_layer_norm(kernels, x, residual, self.weight, self._bias, spec.eps, quantized=quantized)
