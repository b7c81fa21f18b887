"""Whether launches of steps wait for the GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.engine.engine import Engine
from shardline.engine.executor import make_executor
from shardline.messages.request import Request
from shardline.runtime.runner import Runner
from shardline.sampling_params import SamplingParams


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
