"""What is measured of a GPU's memory, on one that is pretended."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardline.runtime.machines.base import StepSizes
from shardline.runtime.machines.cuda.graphs import GraphReplay, PaddedStep, Recording, batch_sizes
from shardline.runtime.machines.cuda.measuring import graph_bytes, measure_step
from shardline.runtime.step import StepInput

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

    def record_call(self, call: Callable[[], Tensor]) -> Recording:
        output = call()
        self._memory.release()
        kept = output.nbytes + SCRATCH(output.shape[0])
        self._memory.take(kept)
        self._pool += kept
        self._memory.driver += DRIVER_PER_GRAPH
        self._graphs += 1
        return Recording(lambda: None, output)

    def discard_recordings(self) -> None:
        self._memory.free(self._pool)
        self._memory.driver -= DRIVER_PER_GRAPH * self._graphs
        self._pool = self._graphs = 0


def SCRATCH(size: int) -> int:
    """Splits of few sequences need more than many sequences."""
    return 9000 if size == 2 else 10 * size


def replay_on(memory: Pretended) -> GraphReplay:
    def forward(step: StepInput, hidden: Tensor) -> Tensor:
        size = len(hidden)
        assert not step.rows.context_lens.any(), "padding has no keys"
        assert bool((step.rows.slots[0] == -1).all()), "padding writes nothing"
        memory.take(SCRATCH(size) + 4 * size)
        memory.free(SCRATCH(size) + 4 * size)
        return torch.zeros(size, 1)

    sizes = StepSizes(max_seqs=8, max_blocks=2, num_kv_groups=1, block_size=16, hidden_size=3, dtype=torch.float32)
    padded = PaddedStep(torch.device("cpu"), sizes)
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

    use = measure_step(memory, step, None)
    assert (use.total, use.others, use.weights, use.step, use.graphs) == (TOTAL, CONTEXT, WEIGHTS, 8000, 0)
    both = measure_step(memory, step, replay_on(memory))
    assert both.graphs == graph_bytes(memory, replay_on(memory))
    assert both.room(0.5) == TOTAL // 2 - CONTEXT - WEIGHTS - 8000 - both.graphs
