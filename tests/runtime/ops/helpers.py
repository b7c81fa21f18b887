from __future__ import annotations

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.kernels.host.kernels import HostKernels

KERNELS = HostKernels()


def write_kv(
    kernels: Kernels,
    *tensors: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """The kernel as `write_kv_reference` is called."""
    key, value, key_cache, value_cache, slots = tensors
    kernels.write_kv(key, value, key_cache, value_cache, slots, key_scales, value_scales)


def randn(*shape: int, dtype: torch.dtype = torch.float32, rng: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=rng).to(dtype)


def sorted_slots(ids: Tensor, first_expert: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """The tokens [R] of the rows of `expert_up` on a CPU, and the experts [R], counted from the first; int64."""
    experts = ids.view(-1).long() - first_expert
    held = ((experts >= 0) & (experts < num_experts)).nonzero()[:, 0]
    held = held[torch.argsort(experts[held], stable=True)]
    return held // ids.shape[1], experts[held]


def assert_close(actual: Tensor, expected: Tensor, *, scale: float | Tensor | None = None) -> None:
    """Within 1e-5 of the values' scale in fp32; in bf16 within one unit in the last place, and mostly equal.

    `scale` is what rounding errors are relative to, where cancellation makes results smaller than their terms.
    """
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    size = expected.double().abs() if scale is None else torch.as_tensor(scale).double()
    error = (actual.double() - expected.double()).abs()
    if actual.dtype == torch.float32:
        assert (error <= 1e-5 * size + 1e-6).all(), f"off by {error.max()}"
    else:
        one_ulp = expected.double().abs() * 2**-7
        assert (error <= one_ulp + 1e-5 * size + 1e-6).all(), f"off by {error.max()}"
        assert (error == 0).double().mean() > 0.97


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    integers = torch.int32 if actual.element_size() == 4 else torch.int16
    assert torch.equal(actual.contiguous().view(integers), expected.contiguous().view(integers))
