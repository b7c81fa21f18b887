"""What is measured of a GPU's memory, on one that is pretended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.runtime.cuda_graphs import GraphReplay, PaddedStep, Recording, batch_sizes
from shardline.runtime.memory_profile import graph_bytes, largest_step, measure
from shardline.runtime.step import StepInput
from tests.models.checkpoints import make_checkpoint

TOTAL, CONTEXT, WEIGHTS, DRIVER_PER_GRAPH = 10**6, 1000, 40_000, 77


class Pretended:
    """An allocator that keeps what was freed until `release`, as torch's does."""

    def __init__(self) -> None:
        self.used = WEIGHTS
        self.cached = 500
        self.driver = CONTEXT
        self._peak = 0

    def take(self, size: int) -> None:
        self.cached = max(0, self.cached - size)
        self.used += size
        self._peak = max(self._peak, self.reserved())

    def free(self, size: int) -> None:
        self.used -= size
        self.cached += size

    def reserved(self) -> int:
        return self.used + self.cached

    def reset_peak(self) -> None:
        self._peak = self.reserved()

    def peak(self) -> int:
        return self._peak

    def free_and_total(self) -> tuple[int, int]:
        return TOTAL - self.driver - self.reserved(), TOTAL

    def release(self) -> None:
        self.cached = 0


class PretendedGraphs:
    """Keeps a graph's output and its scratch, and something of the driver's."""

    def __init__(self, memory: Pretended) -> None:
        self._memory = memory
        self._pool = self._graphs = 0

    def record(self, call: Callable[[], Tensor]) -> Recording:
        output = call()
        self._memory.release()
        kept = output.nbytes + SCRATCH(output.shape[0])
        self._memory.take(kept)
        self._pool += kept
        self._memory.driver += DRIVER_PER_GRAPH
        self._graphs += 1
        return Recording(lambda: None, output)

    def discard(self) -> None:
        self._memory.free(self._pool)
        self._memory.driver -= DRIVER_PER_GRAPH * self._graphs
        self._pool = self._graphs = 0


def SCRATCH(size: int) -> int:
    """Splits of few sequences need more than many sequences."""
    return 9000 if size == 2 else 10 * size


def replay_on(memory: Pretended) -> GraphReplay:
    def forward(step: StepInput, hidden: Tensor) -> Tensor:
        size = len(hidden)
        assert not step.context_lens.any(), "padding has no keys"
        assert bool((step.kv_groups[0].slots == -1).all()), "padding writes nothing"
        memory.take(SCRATCH(size) + 4 * size)
        memory.free(SCRATCH(size) + 4 * size)
        return torch.zeros(size, 1)

    padded = PaddedStep(
        torch.device("cpu"), max_seqs=8, max_blocks=2, num_kv_groups=1, hidden_size=3, dtype=torch.float32
    )
    return GraphReplay(forward, padded, 8, PretendedGraphs(memory))


def test_graphs_are_charged_with_shared_scratch_their_outputs_and_the_drivers_part() -> None:
    memory = Pretended()
    outputs = 4 * sum(batch_sizes(8))
    assert graph_bytes(memory, replay_on(memory)) == (9000 + 4 * 2) + outputs + DRIVER_PER_GRAPH * len(batch_sizes(8))
    memory.release()
    assert memory.used == WEIGHTS, "the trial is given back"
    assert memory.driver == CONTEXT


def test_a_step_is_charged_with_its_peak() -> None:
    memory = Pretended()

    def step() -> None:
        memory.take(3000)
        memory.take(4000)
        memory.free(4000)
        memory.take(5000)
        memory.free(8000)

    use = measure(memory, step, None)
    assert (use.total, use.others, use.weights, use.step, use.graphs) == (TOTAL, CONTEXT, WEIGHTS, 8000, 0)
    both = measure(memory, step, replay_on(memory))
    assert both.graphs == graph_bytes(memory, replay_on(memory))
    assert both.room(0.5) == TOTAL // 2 - CONTEXT - WEIGHTS - 8000 - both.graphs


@pytest.mark.parametrize(("tokens", "seqs", "length"), [(64, 6, 32), (8, 30, 32), (500, 3, 32)])
def test_the_largest_step_is_the_largest_plan(tokens: int, seqs: int, length: int, tmp_path: Path) -> None:
    options = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs, "max_model_len": length}
    model = make_checkpoint("gemma3_text", tmp_path)
    setup = resolve_here(EngineConfig.from_options(model=str(model), device="cpu", **options))
    step = largest_step(setup)
    assert step.plan.num_tokens == min(tokens, seqs * length) == step.replica_tokens[0]
    assert step.plan.num_samples == min(seqs, tokens) == len(step.plan.starts)
    assert all(start.sampling.frequency_penalty and start.sampling.logprobs for start in step.plan.starts)
    assert max(entry.num_tokens for entry in step.plan.steps) <= length
    for entry in step.plan.steps:
        assert len(entry.new_blocks) == len(setup.cache.groups)
        assert all(len(blocks) * 16 >= entry.num_tokens and not any(blocks) for blocks in entry.new_blocks)
