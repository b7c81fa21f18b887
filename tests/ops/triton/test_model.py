"""A whole model through the GPU's kernels: greedy tokens are the CPU's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardline import _cpu
from shardline.config.engine import EngineConfig
from shardline.engine.resolve import resolve
from shardline.runtime.cuda_graphs import PaddedStep
from shardline.runtime.device import Uploader
from shardline.runtime.ops import dispatch
from shardline.runtime.ops import triton as ops
from shardline.runtime.parallel.groups import alone
from shardline.runtime.replay import DecodeReplay
from shardline.runtime.setup import prepare
from shardline.runtime.step import KVGroupInput, SampledTokens, StepInput
from shardline.runtime.worker import Worker

from ..helpers import assert_same_bits

CONFIG = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
"rope_theta": 10000.0, "max_position_embeddings": 64, "num_key_value_heads": 1, "num_attention_heads": 2,
"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96, "torch_dtype": "float32",
"tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2}"""


@pytest.fixture
def loaded(tmp_path: Path):
    """Makes a loaded worker of one rank, with the same weights every time."""
    (tmp_path / "config.json").write_text(CONFIG)
    options = {"load_format": "dummy", "device": "cpu", "cpu_threads": 1, "num_gpu_blocks_override": 8}

    def load() -> Worker:
        worker = Worker(prepare(resolve(EngineConfig.from_options(model=str(tmp_path), **options))), alone())
        worker.load()
        return worker

    return load


def step_of(tokens: list[int], start: int) -> StepInput:
    """One sequence's tokens from position `start` on; its blocks are 3 and 1."""
    positions = torch.arange(start, start + len(tokens))
    tables = torch.tensor([[3, 1]], dtype=torch.int32)
    return StepInput(
        token_ids=torch.tensor(tokens),
        positions=positions,
        query_starts=torch.tensor([0, len(tokens)], dtype=torch.int32),
        context_lens=torch.tensor([start + len(tokens)], dtype=torch.int32),
        kv_groups=(KVGroupInput(tables, tables[0, positions // 16].long() * 16 + positions % 16),),
        replica_tokens=(len(tokens),),
        replica_samples=(len(tokens),),
        sampled=None,
    )


@torch.inference_mode()
def logits(worker: Worker, padded_size: int) -> list[torch.Tensor]:
    """Of a prompt in two chunks, then of two decode steps, one padded to a batch of `padded_size`."""
    stage, prompt = worker.stage, [5, 17, 80, 3, 44, 9, 61, 2, 33, 70, 12, 8, 90, 25, 1, 7, 19]
    results = []
    for tokens, start in ((prompt[:10], 0), (prompt[10:], 10), ([40], 17)):
        step = Uploader(torch.device("cpu")).upload(step_of(tokens, start))
        results.append(stage.forward(step, stage.embed(step)))
    padded = PaddedStep(
        torch.device("cpu"), max_seqs=4, max_blocks=5, num_kv_groups=1, hidden_size=32, dtype=torch.float32
    )
    step = step_of([41], 18)
    padded.fill(step, stage.embed(step), padded_size)
    return [*results, stage.forward(*padded.first(padded_size))[:1]]


def test_logits_are_the_cpus(loaded, monkeypatch):
    expected = logits(loaded(), 1)
    kernels = SimpleNamespace(**{name: getattr(ops, name) for name in ops.__all__})
    kernels.activation_empty = _cpu.activation_empty  # there is no GPU to allocate on
    monkeypatch.setitem(dispatch._BACK_ENDS, "cpu", lambda: kernels)
    monkeypatch.setattr(DecodeReplay, "__call__", lambda self, *step: self.forward(*step))
    actual = logits(loaded(), 4)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()
        assert torch.equal(ours.argmax(1), theirs.argmax(1))


def test_uploaded_steps_are_the_steps():
    step = step_of([5, 6, 7], 4)
    tables = step.kv_groups[0].block_tables
    last = SampledTokens(torch.tensor([2]), torch.tensor([0, 1]), step.context_lens, (tables,))
    for sampled in (None, last):
        given = dataclasses.replace(step, sampled=sampled)
        moved = Uploader(torch.device("cpu")).upload(given)
        for name in ("token_ids", "positions", "query_starts", "context_lens"):
            assert_same = torch.equal(getattr(moved, name), getattr(given, name))
            assert assert_same, name
        assert_same_bits(moved.kv_groups[0].block_tables, given.kv_groups[0].block_tables)
        assert torch.equal(moved.kv_groups[0].slots, given.kv_groups[0].slots)
        if sampled is None:
            assert moved.sampled is None
        else:
            assert moved.sampled is not None
            assert torch.equal(moved.sampled.rows, last.rows)
            assert torch.equal(moved.sampled.query_starts, last.query_starts)
            assert torch.equal(moved.sampled.context_lens, last.context_lens)
            assert torch.equal(moved.sampled.block_tables[0], tables)
