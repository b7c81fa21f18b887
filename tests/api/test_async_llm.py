"""AsyncLLM over fake engines: streams, aborts, deaths, drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import pytest

import shardline
from shardline.api.async_llm import AsyncLLM
from shardline.api.engines import EngineEvent
from shardline.api.errors import EngineDead, EngineDraining, QueueFull
from shardline.api.outputs import RequestOutput
from shardline.api.streams import Inbox
from shardline.config.engine import EngineConfig
from shardline.messages.engine import EngineFailed
from shardline.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from tests.api.fake_engine import MAX_MODEL_LEN, FakeCluster, load_text, next_token, scripted

Test = Callable[..., Coroutine[Any, Any, None]]


def on_loop(test: Test) -> Callable[..., None]:
    """Run an async test on a loop of its own, within 20 s."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 20))

    return run


@asynccontextmanager
async def engine(cluster: FakeCluster, **options: Any) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(EngineConfig.from_options(**options), connect=cluster, load_text=load_text)
    try:
        await llm.wait_ready()
        yield llm
    finally:
        await llm.close()
        assert all(client.closed for client in cluster.clients)


async def last(llm: AsyncLLM, prompt: Any, **params: Any) -> RequestOutput:
    return [output async for output in llm.generate(prompt, SamplingParams(**params))][-1]


@on_loop
async def test_an_event_that_fails_does_not_hold_up_the_others() -> None:
    loop, failures, delivered = asyncio.get_running_loop(), asyncio.Queue[Any](), asyncio.Queue[int]()
    loop.set_exception_handler(lambda _, context: failures.put_nowait(context["exception"]))

    def deliver(index: int, event: EngineEvent) -> None:
        assert index, "the first one fails"
        delivered.put_nowait(index)

    inbox = Inbox(deliver)
    for index in range(3):
        inbox.put_event(index, EngineFailed(""))
    inbox.open(loop)
    assert [await delivered.get(), await delivered.get()] == [1, 2]
    assert isinstance(failures.get_nowait(), AssertionError)


@on_loop
async def test_a_stream_grows_one_object() -> None:
    async with engine(FakeCluster()) as llm:
        assert llm.model.tokenizer is not None
        lengths, seen = [], set()
        async for output in llm.generate("the dog", SamplingParams(n=2, max_tokens=8, logprobs=0)):
            lengths.append(sum(len(choice.token_ids) for choice in output.outputs))
            seen.add(id(output))
        assert len(seen) == 1
        assert lengths == sorted(lengths)
        for child in output.outputs:
            assert child.finish_reason == "length"
            assert len(child.logprobs or []) == 8
            assert llm.model.tokenizer.decode(output.prompt_token_ids + child.token_ids) == "the dog" + child.text
        assert output.outputs[0].token_ids != output.outputs[1].token_ids
        assert output.prompt == "the dog"
        assert output.num_cached_tokens == 16
        assert len(llm.model.streams) == 0


@on_loop
async def test_outputs_of_other_kinds() -> None:
    async with engine(FakeCluster()) as llm:
        whole = await last(llm, "the dog", n=2, max_tokens=8, logprobs=0)
        params = SamplingParams(n=2, max_tokens=8, logprobs=0, output_kind=RequestOutputKind.DELTA)
        parts = [output async for output in llm.generate("the dog", params)]
        for choice in whole.outputs:
            own = [part for output in parts for part in output.outputs if part.index == choice.index]
            assert "".join(part.text for part in own) == choice.text
            assert [token for part in own for token in part.token_ids] == choice.token_ids
            assert [part.finish_reason for part in own if part.finished()] == ["length"]
            assert [entry for part in own for entry in part.logprobs or []] == choice.logprobs
        params.output_kind = RequestOutputKind.FINAL_ONLY
        [only] = [output async for output in llm.generate("the dog", params)]
        assert [choice.text for choice in only.outputs] == [choice.text for choice in whole.outputs]


@on_loop
async def test_as_a_context_manager_with_arguments_of_vllm() -> None:
    cluster = FakeCluster()
    async with shardline.AsyncLLM(EngineConfig(), connect=cluster, load_text=load_text) as llm:
        outputs = llm.generate(prompt="dog", sampling_params=SamplingParams(max_tokens=2), request_id="a")
        assert [output.finished async for output in outputs][-1]
        with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
            await llm.generate("dog", {}).__anext__()  # type: ignore[arg-type]
    assert llm.state() == "dead"
    with pytest.raises(ValueError, match=r"AsyncLLM takes EngineConfig.from_options\(model=...\), not 'demo'"):
        shardline.AsyncLLM("demo")  # type: ignore[arg-type]


@on_loop
async def test_what_is_known_once_ready() -> None:
    llm = shardline.AsyncLLM(
        EngineConfig.from_options(data_parallel_size=2), connect=FakeCluster(), load_text=load_text
    )
    assert llm.state() == "starting"
    assert len(llm.stats()) == 2
    with pytest.raises(EngineDead, match="still starting"):
        await llm.submit("x", SamplingParams())
    await llm.wait_ready()
    await llm.wait_ready()
    assert llm.state() == "ready"
    assert (llm.model.max_model_len, llm.model.fingerprint) == (MAX_MODEL_LEN, "sl-fake")
    assert llm.model.report == ["replica 0 is up", "replica 1 is up"]
    assert llm.model.chat_template is not None
    await llm.close()
    assert llm.state() == "dead"


@on_loop
async def test_slow_readers_get_merged_updates() -> None:
    async with engine(FakeCluster()) as llm:
        stream = await llm.submit("the dog", SamplingParams(max_tokens=30))
        while not stream.output.finished:
            await asyncio.sleep(0.01)
        items = [len(output.outputs[0].token_ids) async for output in stream]
        assert items == [30]


@on_loop
async def test_many_requests_over_replicas_get_their_own_tokens() -> None:
    cluster = FakeCluster()
    async with engine(cluster, data_parallel_size=2) as llm:
        outputs = await asyncio.gather(*(last(llm, [5 + i, 6], max_tokens=5 + i % 7) for i in range(40)))
        for i, output in enumerate(outputs):
            request = next(r for c in cluster.clients for r in c.added if r.request_id == f"{output.request_id}-0")
            expected = [next_token(request, position) for position in range(5 + i % 7)]
            assert output.outputs[0].token_ids == expected
        assert all(len(client.added) >= 15 for client in cluster.clients)


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_stop_strings_abort_in_the_engine(tokens_per_step: int) -> None:
    text = load_text(EngineConfig())
    assert text.tokenizer is not None
    ids = text.tokenizer.encode_text("one two. three four five")

    @on_loop
    async def check() -> None:
        cluster = FakeCluster(next_token=scripted(ids), tokens_per_step=tokens_per_step)
        async with engine(cluster) as llm:
            output = await last(llm, "x", stop=["three"], max_tokens=50)
            assert output.outputs[0].text == "one two. "
            assert output.outputs[0].stop_reason == "three"
            assert cluster.clients[0].aborted == [f"{output.request_id}-0"]
            assert cluster.clients[0].running == {}

    check()


@on_loop
async def test_leaving_early_aborts() -> None:
    cluster = FakeCluster()
    async with engine(cluster) as llm:
        client = cluster.clients[0]
        outputs = llm.generate("the dog", SamplingParams(max_tokens=None), request_id="left")
        await outputs.__anext__()
        await outputs.aclose()  # type: ignore[attr-defined]
        assert client.aborted == ["left-0"]

        client.paused.set()
        task = asyncio.create_task(last(llm, "the dog", max_tokens=None, n=2))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(client.aborted) == 3
        assert client.running == {}
        assert len(llm.model.streams) == 0


@on_loop
async def test_abort_by_id_finishes_the_stream() -> None:
    cluster = FakeCluster()
    async with engine(cluster) as llm:
        cluster.clients[0].paused.set()
        stream = await llm.submit("the dog", SamplingParams(), request_id="a")
        with pytest.raises(ValueError, match="in flight already"):
            await llm.submit("the dog", SamplingParams(), request_id="a")
        await llm.abort("a")
        await llm.abort("unknown")
        assert [output.outputs[0].finish_reason async for output in stream] == ["abort"]


@on_loop
async def test_bad_requests_are_refused_before_any_output() -> None:
    async with engine(FakeCluster()) as llm:
        with pytest.raises(ValueError, match=f"maximum context length is {MAX_MODEL_LEN}"):
            await llm.submit("dog " * 20_000, SamplingParams())
        with pytest.raises(ValueError, match="out of vocabulary"):
            await llm.generate([999], SamplingParams()).__anext__()
        assert len(llm.model.streams) == 0


@on_loop
async def test_too_many_waiting() -> None:
    cluster = FakeCluster()
    async with engine(cluster, max_num_seqs=1, max_num_waiting=1) as llm:
        cluster.clients[0].paused.set()
        streams = [await llm.submit("dog", SamplingParams()) for _ in range(2)]
        with pytest.raises(QueueFull):
            await llm.submit("dog", SamplingParams())
        cluster.clients[0].paused.clear()
        for stream in streams:
            assert [output async for output in stream][-1].finished


@on_loop
async def test_with_exit_one_failure_ends_everything() -> None:
    cluster = FakeCluster()
    async with engine(cluster, data_parallel_size=2, on_failure="exit") as llm:
        for client in cluster.clients:
            client.paused.set()
        tasks = [asyncio.create_task(last(llm, "dog", max_tokens=5)) for _ in range(4)]
        await asyncio.sleep(0.05)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(llm.wait_dead(), 0.01)
        await asyncio.to_thread(cluster.clients[1].die, "rank 1 was killed")
        outputs = [(await task).outputs[0] for task in tasks]
        assert [(o.finish_reason, o.error) for o in outputs] == [("error", "rank 1 was killed")] * 4
        await asyncio.wait_for(llm.wait_dead(), 1)
        assert llm.state() == "dead"
        assert llm.replicas_alive() == [False, False]
        assert llm.dead_reason == "rank 1 was killed"
        with pytest.raises(EngineDead, match="rank 1 was killed"):
            await llm.submit("dog", SamplingParams())


@on_loop
async def test_drain_refuses_the_new_and_finishes_the_old() -> None:
    cluster = FakeCluster()
    async with engine(cluster) as llm:
        cluster.clients[0].paused.set()
        stream = await llm.submit("dog", SamplingParams(max_tokens=4))
        llm.drain()
        assert llm.state() == "draining"
        with pytest.raises(EngineDraining):
            await llm.submit("dog", SamplingParams())
        cluster.clients[0].paused.clear()
        assert [output async for output in stream][-1].outputs[0].finish_reason == "length"


@on_loop
async def test_close_ends_open_streams() -> None:
    cluster = FakeCluster()
    async with engine(cluster) as llm:
        cluster.clients[0].paused.set()
        stream = await llm.submit("dog", SamplingParams())
        await llm.close()
        assert [output.outputs[0].finish_reason async for output in stream] == ["abort"]


@pytest.mark.parametrize("error", [ValueError("no such model"), RuntimeError("out of memory")])
def test_a_failed_start(error: Exception) -> None:
    @on_loop
    async def check() -> None:
        llm = AsyncLLM(EngineConfig(), connect=FakeCluster(start_error=error), load_text=load_text)
        with pytest.raises(type(error), match=str(error)):
            await llm.wait_ready()
        assert llm.state() == "dead"
        assert llm.dead_reason == str(error)

    check()


@on_loop
async def test_unreadable_model_files_fail_the_start() -> None:
    def broken(config: EngineConfig) -> Any:
        raise ValueError("not a tokenizer")

    cluster = FakeCluster()
    llm = AsyncLLM(EngineConfig(), connect=cluster, load_text=broken)
    with pytest.raises(ValueError, match="not a tokenizer"):
        await llm.wait_ready()
    assert cluster.clients[0].closed


@on_loop
async def test_structured_outputs_are_checked_before_anything_is_sent() -> None:
    cluster = FakeCluster()
    async with engine(cluster) as llm:
        await last(llm, "dog", structured_outputs=StructuredOutputsParams(regex="a+"), max_tokens=2)
        [request] = cluster.clients[0].added
        assert request.constraints is not None
        assert "a+" in request.constraints.grammar
        with pytest.raises(ValueError, match="no text matches"):
            await last(llm, "dog", structured_outputs=StructuredOutputsParams(grammar="start: start"))
        assert len(cluster.clients[0].added) == 1
