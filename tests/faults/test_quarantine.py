"""A request that makes its engine hang, beside innocent streams: it alone gets an error."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import aclosing

import pytest

from shardline.api.async_llm import AsyncLLM
from shardline.api.outputs import RequestOutput
from shardline.config.engine import EngineConfig
from shardline.engine.children import Child
from shardline.sampling_params import SamplingParams
from tests.faults.processes import assert_all_end

HOSTILE = 321
"""Engines hang at the fifth token after a prompt that begins with this one."""
PROMPT_TOKENS = 8

HANGING = f"""
import time
from shardline.engine.executor.uni import UniExecutor

hostile = set()
submit_step = UniExecutor.submit_step

def hang(self, plans):
    for plan in plans:
        hostile.difference_update(plan.ends)
        hostile.update(start.seq_id for start in plan.starts if start.token_ids[0] == {HOSTILE})
        while any(step.seq_id in hostile and step.start >= {PROMPT_TOKENS + 4} for step in plan.steps):
            time.sleep(1)
    return submit_step(self, plans)

UniExecutor.submit_step = hang
from shardline.engine.process import main
main()
"""


async def collect(llm: AsyncLLM, first: int, params: SamplingParams) -> RequestOutput:
    stream = await llm.submit([first] * PROMPT_TOKENS, params)
    async with aclosing(stream):
        async for _ in stream:
            pass
    return stream.output


@pytest.mark.usefixtures("forked_engines")
def test_a_request_that_hangs_its_engine_ends_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Child, "code", lambda self, module: HANGING)
    params = SamplingParams(max_tokens=200, ignore_eos=True, seed=5)

    async def run() -> None:
        config = EngineConfig.from_options(model="demo", data_parallel_size=2, step_timeout=1.0)
        llm = AsyncLLM(config)
        try:
            await llm.wait_ready()
            pids = [int(pid) for pid in re.findall(r"pid (\d+)", "\n".join(llm.model.report))]
            undisturbed = await asyncio.gather(*(collect(llm, first, params) for first in range(4)))
            assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
            outputs = await asyncio.gather(*(collect(llm, first, params) for first in (0, 1, HOSTILE, 2, 3)))
            [hostile] = outputs.pop(2).outputs
            assert hostile.finish_reason == "error"
            assert hostile.error is not None
            assert re.search(
                r"has not answered for .* \(this request was running at an earlier failure, and alone", hostile.error
            )
            assert len(hostile.token_ids) in (5, 6)  # the restarted engine computes five tokens in one step
            assert [output.outputs for output in outputs] == [output.outputs for output in undisturbed]
            while not all(llm.replicas_alive()):  # the limit is that of the whole test
                await asyncio.sleep(0.05)
            assert len(re.findall(r"replica \d is lost", caplog.text)) == 2
            assert len(re.findall(r"replica \d is lost with 1 choices", caplog.text)) == 1
        finally:
            await llm.close()
        assert_all_end(pids, within=5)

    asyncio.run(asyncio.wait_for(run(), 60))
