"""Products of few rows with what lies around them: the bits of one op after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardline.deployment.kernel_cases import fits_tile
from shardline.kernels.cuda.rows import AddedRows, HeadNorms, UnnormedRows
from shardline.kernels.cuda.triton import linear as products
from shardline.kernels.cuda.triton import qkv_linear as qkv_kernel
from shardline.models.parts import Rope
from shardline.runtime.machines.cuda.fused_layers import add_linear, qkv_linear, unnormed_linear
from shardline.runtime.ops import norm
from shardline.runtime.ops.activation import ActivationName, gated_activation
from shardline.runtime.ops.attention.rope import rotary_table
from shardline.runtime.worker import Worker
from shardline.weights.formats.plain import Format, PlainLinear
from tests.kernels.cuda.helpers import KERNELS
from tests.kernels.cuda.test_model import load, step_of
from tests.models.checkpoints import make_checkpoint
from tests.runtime.ops.helpers import assert_same_bits, randn

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def pack(weight: Tensor) -> PlainLinear:
    return Format().pack_linear(KERNELS, weight)


def added(rows: int, depth: int, width: int, dtype: torch.dtype, rng: torch.Generator) -> tuple[AddedRows, Tensor]:
    """`add_linear` of random rows, and the same by a linear and an addition."""
    x, weight, bias = (randn(*shape, dtype=dtype, rng=rng) for shape in ((rows, depth), (width, depth), (width,)))
    wide = randn(rows, width + 7, dtype=dtype, rng=rng)
    residual = wide[:, 3 : width + 3]
    linear = pack(weight)
    return add_linear(KERNELS, x, linear.panels, bias, residual), linear(x, bias) + residual


@DTYPES
@pytest.mark.parametrize(("rows", "depth", "width"), [(1, 40, 33), (64, 100, 200), (3, 7, 1)])
def test_what_is_added_and_normed_has_the_bits_of_separate_ops(rng, dtype, rows, depth, width):
    sums, expected = added(rows, depth, width, dtype, rng)
    assert_same_bits(sums.rows, expected)
    norm_weight, weight, bias = (randn(*shape, dtype=dtype, rng=rng) for shape in ((width,), (70, width), (70,)))
    linear = pack(weight)
    for offset in (0.0, 1.0):
        unnormed = UnnormedRows(*sums, norm_weight, 1e-3, offset)
        normed = norm.rms_norm(KERNELS, expected, norm_weight, 1e-3, weight_offset=offset)
        for out_dtype in (dtype, torch.float32):
            actual = unnormed_linear(KERNELS, unnormed, linear.panels, bias, out_dtype=out_dtype)
            assert_same_bits(actual, linear(normed, bias, out_dtype=out_dtype))
        name: ActivationName
        for name in ("silu", "gelu_tanh"):
            actual = unnormed_linear(KERNELS, unnormed, linear.panels, bias, gate=name)
            assert_same_bits(actual, gated_activation(KERNELS, linear(normed, bias), name))


def test_a_norm_follows_from_the_row_alone(rng):
    """Whoever adds up the squares, of however many rows."""
    sums, _ = added(64, 50, 200, torch.float32, rng)
    weight, linear = randn(200, rng=rng), pack(randn(40, 200, rng=rng))
    whole = unnormed_linear(KERNELS, UnnormedRows(*sums, weight, 1e-6, 0.0), linear.panels, None)
    one = UnnormedRows(sums.rows[17:18], sums.square_sums[17:18], weight, 1e-6, 0.0)
    assert_same_bits(unnormed_linear(KERNELS, one, linear.panels, None), whole[17:18])


ROTATIONS = {
    "halves": (32, 32, False),
    "interleaved": (32, 32, True),
    "a part": (24, 16, False),
    "a part, interleaved": (20, 12, True),
}


@DTYPES
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("rows", [1, 6])
def test_queries_keys_and_values_are_those_of_separate_ops(rng, dtype, rotation, rows):
    head_dim, rotary_dim, interleaved = ROTATIONS[rotation]
    heads, kv_heads, hidden = 3, 2, 90
    weight = randn((heads + 2 * kv_heads) * head_dim, hidden, dtype=dtype, rng=rng)
    linear, bias = pack(weight), randn(len(weight), dtype=dtype, rng=rng)
    table = rotary_table(1.0 / (100.0 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)), 300)
    positions = torch.randint(0, 300, (rows,), generator=rng)
    slots = torch.randperm(64, generator=rng)[:rows]
    slots[-1] = -1 if rows > 1 else slots[-1]
    sums, _ = added(rows, 30, hidden, dtype, rng)
    unnormed = UnnormedRows(*sums, randn(hidden, dtype=dtype, rng=rng), 1e-3, 0.0)
    normed = norm.rms_norm(KERNELS, sums.rows, unnormed.weight, 1e-3)
    cases: list[HeadNorms | None] = [None]
    if rotation in ("halves", "interleaved"):
        cases += [HeadNorms(randn(32, dtype=dtype, rng=rng), randn(32, dtype=dtype, rng=rng), 1e-3, o) for o in (0, 1)]
    for norms in cases:
        expected = [torch.full((4, kv_heads, 16, head_dim), torch.nan, dtype=dtype) for _ in "kv"]
        actual = [cache.clone() for cache in expected]
        every = linear(normed, bias).view(rows, -1, head_dim)
        query, key, value = every.split([heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            query = norm.rms_norm(KERNELS, query, norms.query, norms.eps, weight_offset=norms.weight_offset)
            key = norm.rms_norm(KERNELS, key, norms.key, norms.eps, weight_offset=norms.weight_offset)
        written = (expected[0], expected[1], positions, slots, table)
        KERNELS.rope_and_write_kv(query, key, value, *written, interleaved, None, None)
        for x in (unnormed, normed):
            place = (actual[0], actual[1], slots, positions, table)
            queries = qkv_linear(KERNELS, x, linear.panels, bias, heads, *place, interleaved=interleaved, norms=norms)
            assert_same_bits(queries, query)
            for ours, theirs in zip(actual, expected, strict=True):
                assert torch.equal(ours.isnan(), theirs.isnan())
                assert_same_bits(ours.nan_to_num(), theirs.nan_to_num())


def test_which_heads_are_normed_in_a_tile():
    def rope(dims: int, interleaved: bool = False) -> Rope:
        return Rope(inv_freq=(1.0,) * (dims // 2), interleaved=interleaved)

    assert fits_tile(128, rope(128))
    assert fits_tile(64, rope(32, interleaved=True))
    assert not fits_tile(64, rope(32)), "its squares would be added in another order"
    assert not fits_tile(96, rope(96))
    assert not fits_tile(256, rope(256)), "no multiprocessor has so much memory"
    assert not fits_tile(128, None)


FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma": {},
    "gemma2": {"num_hidden_layers": 1},
    "phi3": {},
    "qwen3_moe": {},
    "deepseek_v2": {},
    "gpt2": {},
}


@torch.inference_mode()
def two_steps(worker: Worker) -> list[Tensor]:
    """Logits of a prompt of three tokens, and of a fourth."""
    stage = worker.stage
    return [stage.forward(step, stage.embed(step)) for step in (step_of([5, 17, 80], 0), step_of([40], 3))]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_the_bits_of_one_op_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str):
    layers: dict[str, Any] = {"n_layer": 2} if family == "gpt2" else {"num_hidden_layers": 2}
    worker = load(make_checkpoint(family, tmp_path, **{**layers, **FAMILIES[family]}), {})
    launched: list[str] = []
    for module, name in ((qkv_kernel, "qkv_linear"), (products, "add_linear")):
        op = getattr(module, name)

        def note(*args: object, op: Any = op, name: str = name) -> None:
            launched.append(name)
            op(*args)

        monkeypatch.setattr(module, name, note)
    actual = two_steps(worker)
    takes_rope = family not in ("deepseek_v2", "gpt2", "qwen3_moe")
    assert ("qkv_linear" in launched) == takes_rope
    assert ("add_linear" in launched) == (family != "gemma2")
    monkeypatch.setattr(worker.stage, "fused", None)
    launched.clear()
    for ours, theirs in zip(actual, two_steps(worker), strict=True):
        assert_same_bits(ours, theirs)
    assert launched == []
