"""Where packed weights lie: parts, halves of panels, strided rows give the bytes of a whole weight packed at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from shardline import _cpu
from shardline.kernels.host.panels import panel_shape
from shardline.weights.base import weight_format
from shardline.weights.formats import int4_fast, int8_fast, plain
from shardline.weights.formats.int8_fast import int8_weight_reference
from tests.runtime.ops.helpers import KERNELS, randn

PARTS = [(64,), (1,), (130,), (64, 64), (100, 28, 28), (7, 3, 1, 90), (65, 0, 64), (17, 47, 200)]


def panels_of(weight: Tensor, step: int, value: float = 0.0) -> Tensor:
    """weight [N, K] as [panel][k / step][column][k % step], filled up with `value`."""
    columns, depth = weight.shape
    filled = torch.nn.functional.pad(weight, (0, -depth % step, 0, -columns % 64), value=value)
    return filled.view(-1, 64, filled.shape[1] // step, step).transpose(1, 2).contiguous()


def split(weight: Tensor, parts: Sequence[int]) -> list[Tensor]:
    """Parts of a weight in memory of their own, with strided rows, not aligned to more than an element."""
    return [torch.nn.functional.pad(part, (1, 2))[:, 1:-2] for part in torch.split(weight, list(parts))]


def pack_parts(pack: Callable[..., None], parts: Sequence[Tensor], *into: Tensor) -> None:
    """One part after another."""
    first = 0
    for part in parts:
        pack(part, *into, first)
        first += len(part)


def halves_in_turn(gate: Tensor, up: Tensor) -> Tensor:
    """32 rows of the gate, 32 of up, and so on, filled up with zeros."""
    halves = [torch.nn.functional.pad(part, (0, 0, 0, -len(part) % 32)).unflatten(0, (-1, 32)) for part in (gate, up)]
    return torch.stack(halves, dim=1).flatten(0, 2)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("depth", [1, 16, 77, 256])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("isa")
def test_panels_of_parts(dtype, rng, parts, depth, threads):
    weight = randn(sum(parts), depth, dtype=dtype, rng=rng)
    panels = torch.full(panel_shape(sum(parts), depth, dtype), torch.nan, dtype=dtype)
    _cpu.set_num_threads(threads)
    pack_parts(KERNELS.pack_weight, split(weight, parts), panels)
    _cpu.set_num_threads(1)
    assert torch.equal(panels.flatten(), panels_of(weight, 2 if dtype == torch.bfloat16 else 1).flatten())


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("depth", [1, 16, 77, 256])
@pytest.mark.usefixtures("isa")
def test_int8_panels_of_parts(dtype, rng, parts, depth):
    weight = randn(sum(parts), depth, dtype=dtype, rng=rng)
    panels, scales = KERNELS.int8_empty(*weight.shape)
    pack_parts(KERNELS.pack_int8, split(weight, parts), panels.fill_(7), scales.fill_(7))
    values, row_scales = int8_weight_reference(weight)
    assert torch.equal(panels.flatten(), (panels_of(values, 4).to(torch.int16) + 128).to(torch.uint8).flatten())
    assert torch.equal(scales, torch.nn.functional.pad(row_scales, (0, len(scales) - len(row_scales))))


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("depth", [1, 16, 77, 256])
@pytest.mark.usefixtures("isa")
def test_int4_panels_of_parts(dtype, rng, parts, depth):
    """What comes of one column alone (`tests/weights/test_int4_fast.py` says what), in its place."""
    weight = randn(sum(parts), depth, dtype=dtype, rng=rng)
    panels, scales = KERNELS.int4_empty(*weight.shape)
    pack_parts(KERNELS.pack_int4, split(weight, parts), panels.fill_(7), scales.fill_(7))
    groups = panels.view(len(panels), -1, 1088)
    for column in {0, len(weight) // 2, len(weight) - 1, len(scales) - 1}:
        row = weight[column : column + 1] if column < len(weight) else torch.zeros(1, depth, dtype=dtype)
        alone, panel, place = int4_fast.Format().pack_linear(KERNELS, row).weight, groups[column // 64], column % 64
        assert torch.equal(
            panel[:, :1024].view(-1, 4, 64, 4)[:, :, place], alone.panels[0, :, :1024].view(-1, 4, 64, 4)[:, :, 0]
        )
        assert torch.equal(panel[:, 1024 + place], alone.panels[0, :, 1024])
        assert scales[column] == alone.scales[0]


@pytest.mark.parametrize("width", [1, 31, 32, 33, 96, 111])
@pytest.mark.parametrize("depth", [5, 64, 90])
@pytest.mark.usefixtures("isa")
def test_halves_of_panels(dtype, rng, width, depth):
    gate, up = (randn(width, depth, dtype=dtype, rng=rng) for _ in range(2))
    stacked, parts = halves_in_turn(gate, up), [split(weight, [width])[0] for weight in (gate, up)]
    packed, expected = plain.Format().pack_gated(KERNELS, *parts), plain.Format().pack_linear(KERNELS, stacked)
    assert torch.equal(packed.panels, expected.panels)
    assert packed.out_features == width
    for form in (int8_fast.Format(), int4_fast.Format()):
        scaled, expected_scaled = form.pack_gated(KERNELS, *parts).weight, form.pack_linear(KERNELS, stacked).weight
        assert torch.equal(scaled.panels, expected_scaled.panels)
        assert torch.equal(scaled.scales, expected_scaled.scales)


@pytest.mark.parametrize("name", ["plain", "int8_fast", "int4_fast"])
def test_formats_take_parts(dtype, rng, name):
    weight, x = randn(150, 70, dtype=dtype, rng=rng), randn(3, 70, dtype=dtype, rng=rng)
    form = weight_format(name)
    in_parts, at_once = form.pack_linear(KERNELS, *split(weight, [70, 50, 30])), form.pack_linear(KERNELS, weight)
    assert torch.equal(in_parts(x), at_once(x))
    stack = form.allocate_experts(KERNELS, 2, *split(weight, [70, 80]))
    whole = form.allocate_experts(KERNELS, 2, weight)
    for index in range(2):
        form.pack_expert(KERNELS, stack, index, *split(weight, [70, 80]))
        form.pack_expert(KERNELS, whole, index, weight)
    assert stack.out_features == 150
    assert torch.equal(stack.panels, whole.panels)
    if name != "plain":
        assert isinstance(stack.scales, Tensor)
        assert isinstance(whole.scales, Tensor)
        assert torch.equal(stack.scales, whole.scales)


def test_places_outside_the_panels_are_refused():
    weight, panels = torch.ones(65, 8), torch.zeros(2, 8, 64)
    for first in (-1, 64):
        with pytest.raises(ValueError, match="panels have too few columns"):
            _cpu.pack_weight(weight, panels, first)
    with pytest.raises(ValueError, match="panels have too few columns"):
        _cpu.pack_weight(weight, panels, half=0)
    for wrong in ({"half": 2}, {"half": -1}, {"half": 1, "first": 3}):
        with pytest.raises(ValueError, match="half is 0 or 1"):
            _cpu.pack_weight(torch.ones(5, 8), panels, **wrong)
    assert not panels.any()
