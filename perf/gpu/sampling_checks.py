"""Checks that tokens are chosen correctly, and that launches never wait for the GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.engine.engine import Engine
from shardline.engine.executor import make_executor
from shardline.kernels.host.kernels import HostKernels
from shardline.messages.request import Request
from shardline.runtime.ops.sampling import logprobs, penalties, sample
from shardline.runtime.runner import Runner
from shardline.sampling_params import SamplingParams

from .inputs import Inputs, relative_error


class SamplingChecks(Inputs):
    """Every method is a check that returns its relative error."""

    def sampling(self) -> float:
        """The share of rows with another token than on the CPU."""
        rows, vocab = (4, 300) if self.small else (256, 128256)
        logits = (3 * torch.randn(rows, vocab, generator=self.rng)).float()
        arguments: dict[str, Tensor] = {
            "temperature": torch.rand(rows, generator=self.rng) + 0.3,
            "top_k": torch.randint(-20, 60, (rows,), generator=self.rng, dtype=torch.int32),
            "top_p": (torch.rand(rows, generator=self.rng) + 0.3).clamp(max=1.0),
            "min_p": torch.rand(rows, generator=self.rng) * 0.02,
            "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=self.rng),
            "choices": torch.arange(rows),
            "positions": torch.arange(rows) * 1000,
        }
        tokens = torch.full((rows,), -1, device=self.device)
        self.kernels.sample(logits.to(self.device), *(a.to(self.device) for a in arguments.values()), 0, tokens)
        wrong = (tokens.cpu() != sample.sample(HostKernels(), logits, **arguments)).double().mean().item()
        ids, values = torch.full((rows,), -1, device=self.device), self.poison(rows, dtype=torch.float32)
        self.kernels.greedy_argmax(logits.to(self.device), ids, values)
        assert torch.equal(ids.cpu(), logits.argmax(1)), "greedy is exact"
        return wrong

    def penalties(self) -> float:
        rows, vocab, entries = (4, 300, 20) if self.small else (64, 128256, 300)
        logits = torch.randn(rows, vocab, generator=self.rng)
        ids = torch.stack([torch.randperm(vocab, generator=self.rng)[:entries] for _ in range(rows)])
        given = penalties.no_penalties(rows)._replace(
            offsets=torch.arange(rows + 1, dtype=torch.int32) * entries,
            ids=ids.flatten().int(),
            output_counts=torch.randint(0, 3, (rows * entries,), generator=self.rng, dtype=torch.int32),
            in_prompt=torch.rand(rows * entries, generator=self.rng) < 0.5,
            bias=torch.randn(rows * entries, generator=self.rng),
            repetition=1 + torch.rand(rows, generator=self.rng),
            presence=torch.randn(rows, generator=self.rng),
            frequency=torch.randn(rows, generator=self.rng),
            # Half of them are among the entries.
            uncounted=torch.where(torch.arange(rows) % 2 == 0, ids[:, 7], (ids.max(1).values + 1) % vocab),
        )
        expected = penalties.penalize_reference(logits, given) - logits
        on_device = penalties.Penalties(*(part.to(self.device) for part in given if part is not None))
        actual = logits.to(self.device, copy=True)
        p = on_device
        entry_parts = (p.offsets, p.ids, p.output_counts, p.in_prompt, p.bias, p.uncounted)
        self.kernels.penalize(actual, p.repetition, p.presence, p.frequency, *entry_parts)
        return relative_error(actual.cpu() - logits, expected)

    def logprobs(self) -> float:
        """The largest error of a log-probability. Ids and ranks are exact."""
        rows, vocab, top_n = (4, 300, 3) if self.small else (32, 128256, 20)
        logits = (3 * torch.randn(rows, vocab, generator=self.rng)).float()
        chosen = torch.randint(0, vocab, (rows,), generator=self.rng)
        expected = logprobs.logprobs_reference(logits, chosen, top_n)
        actual = logprobs.Logprobs(*(torch.empty_like(part, device=self.device) for part in expected))
        self.kernels.logprobs(logits.to(self.device), chosen.to(self.device), top_n, *actual)
        assert torch.equal(actual.top_ids.cpu(), expected.top_ids), "ids are exact"
        assert torch.equal(actual.chosen_ranks.cpu(), expected.chosen_ranks), "ranks are exact"
        errors = [relative_error(a, e) for a, e in zip(actual[::3], expected[::3], strict=True)]
        return max(errors)


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Make a launch fail if torch would wait for the GPU in it."""
    launch = Runner.launch_step

    def watched(self: Runner, step: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(self, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    Runner.launch_step = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        Runner.launch_step = launch  # type: ignore[method-assign]


_PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}, "logprobs": 3},
    {"temperature": 1.3, "seed": -3, "min_p": 0.05, "frequency_penalty": 0.7, "presence_penalty": 0.2},
    {"temperature": 0.0, "min_tokens": 4, "logits_digest": True},
]


def _requests() -> list[Request]:
    rng = random.Random(1)
    return [
        Request(
            request_id=f"r{index}",
            prompt_token_ids=[rng.randrange(3, 250) for _ in range(5 + 11 * index)],
            sampling=SamplingParams(max_tokens=24, **_PARAMS[index % len(_PARAMS)]),
            eos_token_ids=(2,),
        )
        for index in range(10)
    ]


def _answers(model: str, device: str, in_flight: int, together: bool) -> dict[str, list[Any]]:
    """Tokens, log-probabilities and digests of all requests, with a number of steps in flight."""
    config = EngineConfig.from_options(model=model, device=device, dtype="bfloat16", max_num_seqs=16)
    setup = resolve_here(config)
    executor = make_executor(setup)
    executor.start()
    executor.max_in_flight = in_flight
    engine = Engine(setup, executor)
    answers: dict[str, list[Any]] = {}
    waiting = _requests()
    try:
        while engine.busy or waiting:
            while waiting and (together or not engine.busy):
                engine.add_request(waiting.pop(0))
            for output in engine.step():
                got = (output.token_ids, output.logprobs, output.digests)
                answers.setdefault(output.request_id, []).append(got)
    finally:
        executor.close()
    return answers


def launches_do_not_wait(model: str = "demo", device: str = "cuda") -> dict[str, Any]:
    """Every kind of sampling with two steps in flight and no wait. Answers must equal those of one step at a time."""
    expected = _answers(model, device, 1, together=False)
    _answers(model, device, 2, together=True)  # compiles what is missing
    with _refusing_to_wait():
        actual = _answers(model, device, 2, together=True)
    differing = [name for name in expected if expected[name] != actual[name]]
    return {"ok": not differing, "differing": differing}
