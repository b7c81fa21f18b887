"""Replayed decode steps against the same steps run anew."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import weakref
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from shardline import _cpu
from shardline.runtime.decoder import DecoderStage
from shardline.runtime.machines.base import StepSizes
from shardline.runtime.machines.host.replay import DecodeReplay
from shardline.runtime.ops.norm import rms_norm
from shardline.runtime.step import Rows, StepInput
from shardline.weights.formats.plain import Format
from tests.exactness.harness import make_requests, run, start_engine
from tests.models.checkpoints import FAMILIES, LIKE_OTHERS, make_checkpoint
from tests.runtime.ops.helpers import KERNELS

HIDDEN = 24


class Layers:
    """Something to replay, which counts how often Python runs it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self._weight = Format().pack_linear(KERNELS, torch.randn(HIDDEN, HIDDEN, generator=generator))
        self._scale = torch.rand(HIDDEN, generator=generator)
        self.runs = 0

    def __call__(self, step: StepInput, hidden: Tensor) -> Tensor:
        self.runs += 1
        for _ in range(3):
            hidden = self._weight(rms_norm(KERNELS, hidden, self._scale, 1e-6))
        return hidden


def decode_step(count: int) -> StepInput:
    index = torch.arange(count)
    tables, starts = (torch.zeros(count, 1, dtype=torch.int32),), torch.arange(count + 1, dtype=torch.int32)
    rows = Rows(index, starts, index.int() + 1, tables, (index,), replicas=(count,))
    return StepInput(index, rows, is_replayable=True)


def replay_of(forward: object) -> DecodeReplay:
    sizes = StepSizes(max_seqs=8, max_blocks=1, num_kv_groups=1, block_size=16, hidden_size=HIDDEN, dtype=torch.float32)
    return DecodeReplay(forward, sizes)  # type: ignore[arg-type]


def test_python_runs_once_per_number_of_sequences() -> None:
    layers, oracle = Layers(), Layers()
    replay = replay_of(layers)
    for round_ in range(3):
        for count in (1, 5, 8):
            hidden = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(10 * round_ + count))
            assert torch.equal(replay(decode_step(count), hidden), oracle(decode_step(count), hidden))
    assert layers.runs == 3


def test_what_does_not_decode_runs_anew() -> None:
    layers = Layers()
    replay = replay_of(layers)
    for _ in range(2):
        elsewhere = dataclasses.replace(decode_step(9), is_replayable=False)
        replay(elsewhere, torch.randn(9, HIDDEN))  # more than there is room for
        step = decode_step(2)
        last = torch.tensor([1])
        narrowed = Rows(last, torch.tensor([0, 1]), torch.tensor([2]), (), (), (1,), places=last)
        chunk = Rows(step.rows.positions, torch.tensor([0, 2]), torch.tensor([2]), (), (), (2,), narrowed)
        replay(StepInput(step.token_ids, chunk), torch.randn(2, HIDDEN))
    assert layers.runs == 4


def test_nothing_that_lives_is_overwritten() -> None:
    layers, oracle = Layers(), Layers()
    replay = replay_of(layers)
    hidden = torch.randn(4, HIDDEN)
    replay(decode_step(4), hidden)
    first = replay(decode_step(4), hidden)
    kept = first.clone()
    second = replay(decode_step(4), 2 * hidden)
    assert torch.equal(first, kept)
    assert torch.equal(second, oracle(decode_step(4), 2 * hidden))
    assert layers.runs == 2


def test_a_program_keeps_the_tensors_of_its_step() -> None:
    """Layouts of steps keep only so many of them."""
    replay, step = replay_of(Layers()), decode_step(2)
    starts = weakref.ref(step.rows.query_starts)
    hidden = torch.randn(2, HIDDEN)
    replay(step, hidden)
    del step
    replay(decode_step(2), hidden)
    assert starts() is not None
    del replay
    assert starts() is None


@pytest.mark.parametrize("compute", [lambda x: x + 1, lambda x: x.float().to(torch.bfloat16), lambda x: x.add_(1)])
def test_layers_that_compute_with_torch_are_not_replayed(compute: object) -> None:
    layers = Layers()
    replay = replay_of(lambda step, hidden: compute(layers(step, hidden)))  # type: ignore[operator]
    hidden = torch.randn(2, HIDDEN)
    first = replay(decode_step(2), hidden).clone()
    assert torch.equal(replay(decode_step(2), hidden), first)
    assert layers.runs == 2


def test_a_first_request_imports_no_compiler() -> None:
    """torch.compile's import takes longer than anything else that a first request waits for."""
    code = """
import sys
from shardline.config.engine import EngineConfig, ModelConfig
from shardline.engine.engine import Engine
from shardline.engine.executor.uni import UniExecutor
from shardline.deployment.here import resolve_here
from shardline.sampling_params import SamplingParams
from shardline.messages.request import Request

setup = resolve_here(EngineConfig(model=ModelConfig(model="demo")))
executor = UniExecutor(setup, 0)
executor.start()
engine = Engine(setup, executor)
params = SamplingParams(max_tokens=4, ignore_eos=True)
engine.add_request(Request(request_id="one", prompt_token_ids=[5, 6], sampling=params))
count = 0
while engine.busy:
    count += sum(len(output.token_ids) for output in engine.step())
print(count, [name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "4 []\n"


def test_a_failed_step_leaves_nothing_recorded() -> None:
    layers = Layers()

    def fail_once(step: StepInput, hidden: Tensor) -> Tensor:
        if layers.runs == 0:
            layers(step, hidden)
            raise RuntimeError("a peer is gone")
        return layers(step, hidden)

    replay, hidden = replay_of(fail_once), torch.randn(2, HIDDEN)
    with pytest.raises(RuntimeError, match="gone"):
        replay(decode_step(2), hidden)
    assert torch.equal(replay(decode_step(2), hidden), Layers()(decode_step(2), hidden))


def test_a_program_needs_an_output() -> None:
    with pytest.raises(ValueError, match="output"):
        _cpu.Program().replay()


CHOOSING = ("deepseek_v32", "glm_moe_dsa")
"""Steps of these choose tokens anew, so they are never recorded."""


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        (family, quantization)
        for number, family in enumerate(family for family in FAMILIES if family not in (*LIKE_OTHERS, *CHOOSING))
        for quantization in ("none", ("int8", "int4")[number % 2])
    ],
)
def test_every_model_is_replayed(family: str, quantization: str, tmp_path: Path) -> None:
    """Alone, Python runs the layers once for prompts of one length and once for decode steps."""
    make_checkpoint(family, tmp_path)
    check_replayed(tmp_path, quantization=quantization)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", {"tensor": 2}),
        ("llama", {"pipeline": 2}),
        ("llama", {"tensor": 2, "pipeline": 2}),
        ("deepseek_v3", {"tensor": 2}),
        ("qwen2_moe", {"tensor": 2, "enable_expert_parallel": True}),
        ("qwen3_moe", {"lockstep": 2, "enable_expert_parallel": True}),
    ],
)
def test_ranks_replay_their_stages(family: str, layout: dict[str, int], tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    check_replayed(tmp_path, **layout)


def check_replayed(model: Path, **options: object) -> None:
    forward = DecoderStage.forward
    runs = 0

    def counted(stage: DecoderStage, step: StepInput, hidden: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return forward(stage, step, hidden)

    request = replace(make_requests(256, count=1)[0], eos_token_ids=())
    prompt = request.prompt_token_ids
    assert len(prompt) <= 32
    other = replace(request, request_id="other", prompt_token_ids=[*prompt[1:], prompt[0] ^ 1])
    with patch.object(DecoderStage, "forward", counted):
        engine, executor = start_engine(model, enable_prefix_caching=False, **options)  # type: ignore[arg-type]
        answers = run(engine, [request], "alone")
        replayed = run(engine, [other], "alone")
        python_runs = runs
        with patch.object(DecodeReplay, "__call__", lambda replay, step, hidden: replay.forward(step, hidden)):
            assert run(engine, [other], "alone") == replayed
        executor.close()
    num_ranks = int(options.get("tensor", 1)) * int(options.get("pipeline", 1))  # type: ignore[call-overload]
    assert len(answers[request.request_id].token_ids) >= 4
    # Replicas in lockstep run each prompt anew: what another one has meanwhile is never the same.
    assert python_runs == (3 if "lockstep" in options else 2) * num_ranks
    assert runs > python_runs
