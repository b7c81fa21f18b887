"""The part of a step that is launched never waits for the device, so that the next one can be launched behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment, KernelFallback, RankPlacement
from shardline.deployment.here import resolve_here
from shardline.engine.executor.uni import UniExecutor
from shardline.kernels.contract import LoadedProducts
from shardline.messages.step import RankStep, SequenceStart, SequenceStep, StepPlan
from shardline.runtime.machines.base import Share
from shardline.runtime.machines.cuda.graphs import GraphReplay, Recording
from shardline.runtime.machines.cuda.machine import CudaBackend
from shardline.runtime.parallel.groups import make_single_rank_groups
from shardline.runtime.runner import PendingStep
from shardline.runtime.worker import Worker
from shardline.sampling_params import SamplingParams
from tests.exactness.cases import NO_MARK, SYNTHID
from tests.exactness.harness import make_requests, marked, run, start_engine
from tests.models.checkpoints import make_checkpoint

META = torch.device("meta")
"""Tensors without values: whoever reads one cannot go on, as whoever reads from a GPU has to wait."""


class ValuelessBackend(CudaBackend):
    """Steps are launched on it, and their results downloaded."""

    def __init__(self) -> None:
        super().__init__(META, "none", "none")

    def choose_kernels(self, deployment: Deployment, here: RankPlacement, share: Share) -> tuple[KernelFallback, ...]:
        return ()

    def finish_loading(self, products: LoadedProducts) -> None: ...


class NoWaiting(TorchDispatchMode):
    """Fails where values leave the device, or come there, and the host would wait; what is downloaded is zeros."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.to):
            names = [argument.name for argument in func._schema.arguments]
            named = {**dict(zip(names, args, strict=False)), **kwargs}
            there = torch.device(named.get("device") or args[0].device).type
            crossed = there != args[0].device.type
            assert not crossed or named.get("non_blocking"), "the host waits for a copy"
            if crossed and there == "cpu":
                return torch.zeros(args[0].shape, dtype=named.get("dtype") or args[0].dtype)
        if func.overloadpacket is torch.ops.aten.copy_ and len(given) > 1:
            assert args[2:] == (True,), "the host waits for a copy"
        indexes = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
        if indexes and "meta" in given:
            assert all(part is None or part.dtype != torch.bool for part in args[1]), "the host waits for a count"
        return func(*args, **kwargs)


WAITING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "bool": lambda x: bool((x > 0).any()),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked assignment of values": lambda x: x.__setitem__(x > 0, x[:2]),
    "upload": lambda x: torch.ones(3).to(x.device),
    "copy": lambda x: x.copy_(torch.ones(4)),
}


@pytest.mark.parametrize("name", WAITING)
def test_waiting_is_noticed(name):
    with NoWaiting(), pytest.raises((AssertionError, NotImplementedError, RuntimeError)):
        WAITING[name](torch.empty(4, device=META))


@pytest.fixture
def valueless_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which nothing is computed; kernels are launched, graphs are replayed."""
    monkeypatch.setattr(InterpretedFunction, "run", lambda *args, **options: None)

    def capture(self: GraphReplay) -> None:
        for size in self.sizes:
            self._recordings[size] = Recording(lambda: None, self.forward(*self._padded.first_sequences(size)))

    monkeypatch.setattr(GraphReplay, "capture_steps", capture)


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1},
    {"temperature": 0.0, "logit_bias": {3: 2.0}, "min_tokens": 2},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "logits_digest": True},
]


def load_worker(model: Path, **options: Any) -> Worker:
    chosen = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "num_gpu_blocks_override": 32, "max_num_seqs": 8}
    setup = resolve_here(EngineConfig.from_options(model=str(model), **{**chosen, **options}))
    layers = len(setup.spec.layers) if setup.num_experts else 0
    worker = Worker(setup, ValuelessBackend(), make_single_rank_groups(layers, setup.num_experts))
    worker.load()
    return worker


def rank_step(number: int, params: list[dict[str, Any]], num_groups: int, prompt: int = 5) -> RankStep:
    """The prompts of one sequence per entry of `params`, then a token more of each in every step."""
    starts = [
        SequenceStart(index, list(range(3, 3 + prompt)), prompt, SamplingParams(**given), 0, (2,))
        for index, given in enumerate(params)
    ]
    begin, size = (0, prompt) if number == 0 else (prompt + number - 1, 1)
    steps = [
        SequenceStep(index, begin, size, [[1 + index]] * num_groups if number == 0 else [[]] * num_groups, -1, True)
        for index in range(len(params))
    ]
    plan = StepPlan(number, starts if number == 0 else [], steps, [])
    return RankStep(plan, (plan.num_tokens,), (plan.num_samples,))


EVERYTHING = tuple(range(len(SAMPLING)))
# What is asked for is not the layers' affair.
CASES = [("llama", asked) for asked in ((0,), (1,), (0, 2), (3,), (0, 4), (5,), EVERYTHING)]
CASES += [(family, EVERYTHING) for family in ("gemma2", "mixtral", "deepseek_v3")]


@pytest.mark.usefixtures("valueless_gpu")
@pytest.mark.parametrize(("family", "asked"), CASES)
def test_launches_do_not_wait(tmp_path, family, asked):
    model = make_checkpoint(family, tmp_path, num_hidden_layers=2)
    worker = load_worker(model)
    params = [SAMPLING[index] for index in asked]
    with NoWaiting():
        steps = [
            worker.runner.launch_step(rank_step(number, params, len(worker._deployment.cache.groups)))
            for number in range(4)
        ]
    for step in steps:
        result = step.result()
        assert result is not None
        assert [len(one.token_ids) for one in result.results] == [1] * len(params)


@pytest.mark.usefixtures("interpreted_gpu")
@pytest.mark.parametrize("mark", [NO_MARK, SYNTHID])
def test_steps_launched_behind_another_have_the_answers_of_steps_alone(tmp_path, monkeypatch, mark):
    """The host knows of every token a step late; penalties, draws and positions do not show it. Marks wait for it."""
    model = make_checkpoint("llama", tmp_path, num_hidden_layers=1)
    requests = [
        msgspec.structs.replace(r, sampling=msgspec.structs.replace(r.sampling, max_tokens=4, logprobs=2))
        for r in marked(make_requests(256, count=6), mark)
    ]
    finish, most = PendingStep.result, 0

    def answers(max_in_flight: int) -> dict[str, Any]:
        engine, executor = start_engine(model, dtype="float32", mark=mark)
        assert isinstance(executor, UniExecutor)
        executor._overlaps_steps, executor.max_in_flight = max_in_flight > 1, max_in_flight
        for scheduler in engine._schedulers:
            scheduler.max_in_flight = max_in_flight

        def counted(self: PendingStep) -> Any:
            nonlocal most
            assert executor._worker is not None
            most = max(most, len(executor._worker.runner._in_flight))
            return finish(self)

        monkeypatch.setattr(PendingStep, "result", counted)
        try:
            return run(engine, requests, "together")
        finally:
            executor.close()

    alone_answers = answers(1)
    assert most == 1
    assert answers(2) == alone_answers
    assert most == 2 or mark != NO_MARK
