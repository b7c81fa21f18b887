"""A whole model through the GPU's kernels: greedy tokens are the CPU's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.kernels.cuda.w4a16 import W4A16Linear
from shardline.kernels.host.kernels import HostKernels
from shardline.models.parts import Activation
from shardline.models.sizes import weight_bytes
from shardline.runtime.layers import attention, mla
from shardline.runtime.layers.linear_attention import StateLayer
from shardline.runtime.machines.base import Backend, StepSizes
from shardline.runtime.machines.cuda.graphs import PaddedStep
from shardline.runtime.machines.cuda.step_inputs import DeviceCounters, Uploader
from shardline.runtime.machines.host.machine import HostBackend
from shardline.runtime.ops.activation import gated_activation_reference
from shardline.runtime.ops.attention.kv_cache import write_kv_reference, write_latent_reference
from shardline.runtime.ops.attention.latent import mla_attention_reference
from shardline.runtime.ops.attention.paged import paged_attention_reference
from shardline.runtime.ops.attention.rope import apply_rope
from shardline.runtime.parallel.groups import make_single_rank_groups
from shardline.runtime.step import Rows, ScoredRows, StepInput
from shardline.runtime.worker import Worker
from shardline.weights.base import FormatChoice
from shardline.weights.formats.fp8 import quantize_rows_fp8_reference
from tests.kernels.cuda.helpers import CPU, KERNELS, InterpretedBackend
from tests.models.checkpoints import make_checkpoint
from tests.runtime.loader.packer import pack_checkpoint
from tests.runtime.ops.helpers import assert_same_bits

PROMPT = [5, 17, 80, 3, 44, 9, 61, 2, 33, 70, 12, 8, 90, 25, 1, 7, 19]
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "llama-int8": ("llama", {"quantization": "int8_fast"}),
    "mistral-kv8": ("mistral", {"kv_cache_dtype": "int8"}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-int4": ("deepseek_v3", {"quantization": "int4_fast"}),
    "mixtral-int8": ("mixtral", {"quantization": "int8_fast"}),
    "qwen2_moe-int4": ("qwen2_moe", {"quantization": "int4_fast"}),
}
"""Family and engine options. Mixtral's experts are routed like Qwen3's, and Qwen2-MoE's first layer is like Llama's."""


def load(folder: Path, options: dict[str, object], backend: Backend | None = None) -> Worker:
    """A loaded worker of one rank, with the same weights every time; by default on a GPU in the interpreter."""
    chosen = {"dtype": "float32", "device": "cpu", "cpu_threads": 1, "num_gpu_blocks_override": 8, "max_model_len": 64}
    chosen["block_size"] = 16
    # What resolve refuses on the CPU.
    accepted = {name: value for name, value in options.items() if value not in ("fp8", "packed_32")}
    setup = resolve_here(EngineConfig.from_options(model=str(folder), **{**chosen, **accepted}))
    if options.get("quantization") == "packed_32":
        setup = replace(setup, weight_format=FormatChoice("packed", 32))
    elif options.get("quantization") == "fp8":
        setup = replace(setup, weight_format=FormatChoice("fp8"))
    if options.get("kv_cache_dtype") == "fp8":
        setup = replace(setup, cache=replace(setup.cache, dtype="float8_e4m3fn"))
    groups = make_single_rank_groups(len(setup.spec.layers) if setup.num_experts else 0, setup.num_experts)
    worker = Worker(setup, backend or InterpretedBackend(), groups)
    worker.load()
    return worker


def step_of(tokens: list[int], start: int, num_kv_groups: int = 1) -> StepInput:
    """One sequence's tokens from position `start` on; its blocks are 3 and 1 in each group."""
    positions = torch.arange(start, start + len(tokens))
    tables = torch.tensor([[3, 1]], dtype=torch.int32)
    rows = Rows(
        positions=positions,
        query_starts=torch.tensor([0, len(tokens)], dtype=torch.int32),
        context_lens=torch.tensor([start + len(tokens)], dtype=torch.int32),
        block_tables=(tables,) * num_kv_groups,
        slots=(tables[0, positions // 16].long() * 16 + positions % 16,) * num_kv_groups,
        replicas=(len(tokens),),
    )
    return StepInput(torch.tensor(tokens), rows)


@torch.inference_mode()
def logits(worker: Worker, padded_size: int) -> list[torch.Tensor]:
    """Of a prompt in two chunks, then of two decode steps, one padded to a batch of `padded_size`."""
    stage = worker.stage
    results = []
    for tokens, start in ((PROMPT[:10], 0), (PROMPT[10:], 10), ([40], 17)):
        step = Uploader(CPU).upload(step_of(tokens, start))
        results.append(stage.forward(step, stage.embed(step)))
    sizes = StepSizes(max_seqs=4, max_blocks=5, num_kv_groups=1, block_size=16, hidden_size=64, dtype=torch.float32)
    padded, step = PaddedStep(CPU, sizes), step_of([41], 18)
    padded.fill_step(step, stage.embed(step), padded_size)
    return [*results, stage.forward(*padded.first_sequences(padded_size))[:1]]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_cpus(tmp_path, case):
    family, options = CASES[case]
    make_checkpoint(family, tmp_path, num_hidden_layers=2)
    cpu = load(tmp_path, options, HostBackend())
    expected = logits(cpu, 1)
    gpu = load(tmp_path, options)
    for ours, theirs in zip(logits(gpu, 4), expected, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()
        assert torch.equal(ours.argmax(1), theirs.argmax(1))
    # Tokens are counted, padding is not.
    assert np.array_equal(gpu._groups.expert_load, cpu._groups.expert_load)


PARTLY_TORCH: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "mimo_v2_flash": {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2},
}
"""Families with ops that GPUs leave to torch, and what makes them small."""


@pytest.mark.parametrize("family", PARTLY_TORCH)
def test_ops_of_torch_beside_kernels(tmp_path, family):
    make_checkpoint(family, tmp_path, **PARTLY_TORCH[family])
    results = []
    for backend in (None, HostBackend()):
        stage = load(tmp_path, {}, backend).stage
        for tokens, start in ((PROMPT[:10], 0), (PROMPT[10:], 10), ([40], 17)):
            step = step_of(tokens, start)
            states = torch.zeros(1, dtype=torch.int32)
            step = dataclasses.replace(step, rows=dataclasses.replace(step.rows, states=states))
            with torch.inference_mode():
                results.append(stage.forward(step, stage.embed(step)))
    for ours, theirs in zip(results[:3], results[3:], strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


class Fp8Oracle(HostKernels):
    """The CPU's kernels, and fp8's in plain torch with sums in fp64."""

    fp8_empty = KERNELS.fp8_empty
    pack_fp8 = staticmethod(KERNELS.pack_fp8)

    @staticmethod
    def linear_fp8(
        x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, gate: str | None = None
    ) -> None:
        rows, row_scales = quantize_rows_fp8_reference(x, values.dtype)
        product = (rows.double() @ values.double().T) * (row_scales.double()[:, None] * scales.double())
        rounded = (product if bias is None else product + bias.double()).to(out.dtype)
        for name in get_args(Activation):
            if name == gate:
                rounded = gated_activation_reference(rounded, name)
        out.copy_(rounded)


def test_fp8_is_its_oracle(tmp_path):
    make_checkpoint("llama", tmp_path, num_hidden_layers=2)
    oracle = HostBackend()
    oracle.kernels = Fp8Oracle()
    expected = logits(load(tmp_path, {"quantization": "fp8"}, oracle), 1)
    actual = logits(load(tmp_path, {"quantization": "fp8"}), 4)
    error = torch.cat([(a - e).norm(dim=1) / e.norm(dim=1) for a, e in zip(actual, expected, strict=True)])
    # An activation about halfway between two of fp8's few values may go either way, and that row is then another.
    assert error.median() < 1e-5
    assert error.max() < 2e-2


# The method decides how a checkpoint is read, see tests/runtime/loader; the family, which weights there are.
@pytest.mark.parametrize(("family", "method"), [("llama", "gptq"), ("qwen2", "awq"), ("mixtral", "awq")])
def test_packed_weights_have_the_bits_of_dense_ones(tmp_path, family, method):
    # Whole pairs of groups: padding is not what the formula counts.
    model = make_checkpoint(family, tmp_path / "model", num_hidden_layers=1, intermediate_size=128)
    config = {"quant_method": method, "bits": 4, "group_size": 32}
    pack_checkpoint(model, tmp_path / "packed", tmp_path / "plain", config)
    worker = load(tmp_path / "packed", {"quantization": "packed_32"})
    for ours, theirs in zip(logits(worker, 4), logits(load(tmp_path / "plain", {}), 4), strict=True):
        assert_same_bits(ours, theirs)
    first = worker.stage.layers[0].attention
    assert isinstance(first, attention.AttentionLayer)
    assert isinstance(first.qkv.packed, W4A16Linear)
    setup = worker._deployment
    expected = weight_bytes(
        setup.spec, make_single_rank_groups().place, setup.stages, "float32", weight_format=FormatChoice("packed", 32)
    )
    assert worker.load().weight_bytes == expected


def without_kernels(reference: Callable[..., Any]) -> Callable[..., Any]:
    """An oracle in the place of its op."""
    return lambda kernels, *args, **options: reference(*args, **options)


def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    interleaved: bool,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    """`Kernels.rope_and_write_kv` with the oracle of its second half."""
    apply_rope(KERNELS, query, key, positions, table, interleaved=interleaved)
    write_kv_reference(key, value, key_cache, value_cache, slots, key_scales=key_scales, value_scales=value_scales)


@pytest.mark.parametrize("family", ["mistral", "deepseek_v2"])
def test_keys_and_values_in_fp8_are_the_oracles(tmp_path, monkeypatch, family):
    make_checkpoint(family, tmp_path, num_hidden_layers=1)
    options: dict[str, object] = {"kv_cache_dtype": "fp8"}
    worker = load(tmp_path, options)
    cached = worker.stage.layers[0].attention
    assert not isinstance(cached, StateLayer)
    stored = cached._cache if isinstance(cached, mla.LatentAttentionLayer) else cached.pages
    assert isinstance(stored, tuple)
    assert stored[0].dtype == torch.float8_e4m3fn
    actual, plain = logits(worker, 4), logits(load(tmp_path, {}), 4)
    monkeypatch.setattr(attention, "paged_attention", without_kernels(paged_attention_reference))
    monkeypatch.setattr(CudaKernels, "rope_and_write_kv", staticmethod(rotate_and_write))
    monkeypatch.setattr(mla, "mla_attention", without_kernels(mla_attention_reference))
    monkeypatch.setattr(mla, "write_latent", without_kernels(write_latent_reference))
    expected = logits(load(tmp_path, options), 1)
    error = torch.cat([(a - e).norm(dim=1) / e.norm(dim=1) for a, e in zip(actual, expected, strict=True)])
    # An element about halfway between two of fp8's few values may go either way.
    assert error.median() < 1e-5
    assert error.max() < 2e-2
    assert all((a - p).norm() > 1e-4 * p.norm() for a, p in zip(actual, plain, strict=True)), "it was fp8"


def test_counters_are_published_now_and_then():
    host = torch.zeros(3, dtype=torch.int64)
    counters = DeviceCounters(host, CPU)
    assert counters.counts is host
    counters.counts = torch.tensor([1, 2, 3])  # as of another device
    counters.publish_counts()
    assert host.tolist() == [1, 2, 3]
    counters.counts += 1
    counters.publish_counts()
    assert host.tolist() == [1, 2, 3], "too early for another copy"


def test_uploaded_steps_are_the_steps():
    step = step_of([5, 6, 7], 4)
    last = torch.tensor([2])
    left = Rows(step.rows.positions[2:], torch.tensor([0, 1]), step.rows.context_lens, step.rows.block_tables, (), (1,))
    scored = ScoredRows(torch.tensor([1]), torch.tensor([40]), torch.tensor([0]))
    for narrowed in (None, left, dataclasses.replace(left, places=last, scored=scored)):
        given = dataclasses.replace(step, rows=dataclasses.replace(step.rows, narrowed=narrowed))
        moved = Uploader(CPU).upload(given)
        assert torch.equal(moved.token_ids, given.token_ids)
        assert_same_rows(moved.rows, given.rows)


def assert_same_rows(actual: Rows, expected: Rows) -> None:
    for name in ("positions", "query_starts", "context_lens"):
        assert_same_bits(getattr(actual, name), getattr(expected, name))
    assert actual.replicas == expected.replicas
    for name in ("block_tables", "slots", "scored"):
        for ours, theirs in zip(getattr(actual, name) or (), getattr(expected, name) or (), strict=True):
            assert_same_bits(ours, theirs)
    assert (actual.places is None) == (expected.places is None)
    if actual.places is not None and expected.places is not None:
        assert_same_bits(actual.places, expected.places)
    assert (actual.narrowed is None) == (expected.narrowed is None)
    if actual.narrowed is not None and expected.narrowed is not None:
        assert_same_rows(actual.narrowed, expected.narrowed)
