"""W8A8 that keeps the model: `int8_fast`, with the parts of rows mixed before they are quantized. On CPUs;
GPUs have `int8_fast` under this name.

Where a few numbers of a row of activations are large, one scale for the row costs much. Those that a norm's weight
makes large become smaller, and the weights that read them larger. Mixed, no others are large.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from shardline.weights.formats import int8_fast
from shardline.weights.rotation import num_parts, rotate_reference
from shardline.weights.scaled import ScaledKernels

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardline.kernels.contract import Kernels


class Format(int8_fast.Format):
    """See `base.WeightFormat`."""

    label = "int8"
    is_for_gpus: ClassVar[bool] = False
    on_gpus: ClassVar[str] = "int8_fast"
    rotates: ClassVar[bool] = True
    folds_norms: ClassVar[bool] = True

    def choose_kernels(self, kernels: Kernels) -> ScaledKernels:
        usual = super().choose_kernels(kernels)
        return usual._replace(pack=partial(usual.pack, rotated=True))

    def multiply_reference(
        self, kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """Gives the same bits as the kernels."""
        mixed = rotate_reference(weight) / num_parts(weight.shape[1])
        return super().multiply_reference(kernels, rotate_reference(x), mixed, bias, out_dtype)
