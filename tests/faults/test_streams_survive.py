"""Streams of real engines that are killed: they go on, and nobody can tell from their tokens."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from contextlib import aclosing
from unittest.mock import patch

import msgspec
import pytest

from shardline import lifeline
from shardline.api.async_llm import AsyncLLM
from shardline.api.outputs import CompletionOutput
from shardline.config.engine import EngineConfig
from shardline.sampling_params import SamplingParams, StructuredOutputsParams
from tests.faults.processes import assert_all_end
from tests.forks import ForkServer

NUMBERS = StructuredOutputsParams(regex="([0-9]{3},){40}end")

REQUESTS = [
    ("Once upon a time", SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)),
    ("The answer is", SamplingParams(temperature=1.0, n=3, max_tokens=200, logprobs=2, ignore_eos=True)),
    ("A list:", SamplingParams(temperature=0.9, top_p=0.9, max_tokens=400, stop=["zzz", "\n\n\n\n"])),
    ("def main():", SamplingParams(temperature=0.7, repetition_penalty=1.2, min_tokens=150, max_tokens=250)),
    ("Numbers:", SamplingParams(temperature=1.0, max_tokens=300, structured_outputs=NUMBERS)),
    ("Hello", SamplingParams(temperature=1.1, frequency_penalty=0.4, logits_digest=True, max_tokens=220)),
]


async def collect(llm: AsyncLLM, prompt: str, params: SamplingParams, flows: asyncio.Event) -> object:
    """The outputs of a stream and its cached tokens; `flows` is set once it has some tokens."""
    stream = await llm.submit(prompt, params)
    async with aclosing(stream):
        async for output in stream:
            if all(len(choice.token_ids) > 20 for choice in output.outputs):
                flows.set()
    flows.set()
    return [known_fields(stream.output.outputs), stream.output.num_cached_tokens]


def known_fields(outputs: list[CompletionOutput]) -> list[dict[str, object]]:
    """All that choices say, without the function that decodes token ids."""
    fields = [msgspec.structs.asdict(output) for output in outputs]
    return [{name: value for name, value in found.items() if not callable(value)} for found in fields]


async def run(options: dict[str, object], kills: list[str]) -> tuple[list[object], list[int]]:
    """All outputs, while each of `kills` ("rank" or "engine") hits replica 0; and the pids that were running first."""
    llm = AsyncLLM(EngineConfig.from_options(model="demo", seed=3, **options))
    try:
        await llm.wait_ready()
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", "\n".join(llm.model.report))]
        flows = [asyncio.Event() for _ in REQUESTS]
        tasks = [
            asyncio.create_task(collect(llm, prompt, params, flow))
            for (prompt, params), flow in zip(REQUESTS, flows, strict=True)
        ]
        await asyncio.gather(*(flow.wait() for flow in flows))
        for kill in kills:
            client = llm._replicas._replicas[0].client
            os.kill(client._child.pid if kill == "engine" else pids[1], signal.SIGKILL)  # type: ignore[attr-defined]
            while client is llm._replicas._replicas[0].client:
                await asyncio.sleep(0.01)
        outputs = await asyncio.gather(*tasks)
        assert llm.state() == "ready"
        return list(outputs), pids
    finally:
        await llm.close()


@pytest.fixture(scope="module")
def undisturbed(fork_server: ForkServer) -> list[object]:
    """All outputs of one rank, which are those of any layout."""
    with patch.object(lifeline, "start_process", fork_server.start_process):
        outputs, _ = asyncio.run(asyncio.wait_for(run({}, []), 120))
    return outputs


@pytest.mark.parametrize(
    ("options", "kills"),
    [
        ({"tensor_parallel_size": 2}, ["rank"]),
        ({"data_parallel_size": 2}, ["engine", "engine"]),
    ],
    ids=["a rank of the only replica", "an engine of two, twice"],
)
def test_nobody_can_tell_from_the_tokens(
    undisturbed: list[object], options: dict[str, object], kills: list[str], request: pytest.FixtureRequest
) -> None:
    """The ranks of the only replica start afresh each time, and engines are forks."""
    if "engine" in kills:
        request.getfixturevalue("forked_engines")
    outputs, pids = asyncio.run(asyncio.wait_for(run(options, kills), 120))
    assert outputs == undisturbed
    assert_all_end(pids, within=10)
