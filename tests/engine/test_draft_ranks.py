"""Drafts by a model on ranks of its own."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shardline import LLM
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment, FixedPool
from shardline.deployment.here import resolve_here
from shardline.deployment.machine import Device, Host, Machine
from shardline.engine.engine import Engine
from shardline.engine.executor import make_executor
from shardline.engine.speculative.ranks import Continuation, DraftRanks, Guesses
from shardline.messages.request import Request
from shardline.sampling_params import SamplingParams
from tests.exactness.harness import Answer, drafts_allowed, run

DEMO = Path(__file__).parents[2] / "src/shardline/demo_model"
VOCAB, DRAFT_VOCAB, LENGTH, MOST = 5, 6, 40, 3


def next_token(tokens: Sequence[int]) -> int:
    """What the draft model of the test guesses: now and then an id that the model does not have."""
    return (7 * sum(tokens[-3:]) + len(tokens)) % 11 % DRAFT_VOCAB


class FakeRanks:
    """Ranks whose tokens come when the test says so."""

    vocab_size, max_model_len = DRAFT_VOCAB, LENGTH

    def __init__(self) -> None:
        self.running: dict[str, tuple[Continuation, list[int], int]] = {}
        self.num_begun = 0

    def begin(self, tokens: Sequence[int], count: int, salt: str) -> Continuation | None:
        assert salt == "salt"
        assert max(tokens) < DRAFT_VOCAB
        count = min(count, LENGTH - len(tokens))
        if count <= 0:
            return None
        self.num_begun += 1
        continuation = Continuation(str(self.num_begun))
        self.running[continuation.request_id] = continuation, list(tokens), count
        return continuation

    def end(self, continuation: Continuation) -> None:
        self.running.pop(continuation.request_id, None)

    def advance(self, count: int) -> None:
        for continuation, tokens, most in self.running.values():
            for _ in range(min(count, most - len(continuation.token_ids))):
                continuation.token_ids.append(next_token([*tokens, *continuation.token_ids]))
            continuation.is_over = len(continuation.token_ids) == most


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4), st.integers(0, DRAFT_VOCAB), st.integers(1, 6))))
def test_guesses_are_what_the_model_would_say_next(turns: list[tuple[int, int, int, int]]) -> None:
    """However late its tokens come, and whatever the sequence's next ones are."""
    ranks: Any = FakeRanks()
    guesses = Guesses(ranks, MOST, VOCAB, "salt")
    tokens = [1, 2, 3]
    for progress, num_right, other, limit in turns:
        ranks.advance(progress)
        drafted = guesses.find_continuation(tokens, limit)
        assert len(drafted) <= limit
        expected = list(tokens)
        for _ in drafted:
            expected.append(next_token(expected))
        assert drafted == list(takewhile(lambda token: token < VOCAB, expected[len(tokens) :]))
        assert len(ranks.running) <= 1
        tokens += drafted[:num_right]
        tokens.append(other)
    guesses.close()
    assert not ranks.running


def test_right_guesses_are_used_without_asking_again() -> None:
    ranks: Any = FakeRanks()
    guesses = Guesses(ranks, MOST, DRAFT_VOCAB, "salt")
    tokens = [1, 2]
    assert guesses.find_continuation(tokens, MOST) == []
    ranks.advance(2 * MOST)
    for _ in range(2):
        drafted = guesses.find_continuation(tokens, MOST)
        assert len(drafted) == MOST
        tokens += drafted
    assert ranks.num_begun == 1


def test_late_guesses_are_asked_for_again() -> None:
    ranks: Any = FakeRanks()
    guesses = Guesses(ranks, MOST, DRAFT_VOCAB, "salt")
    guesses.find_continuation([1, 2], MOST)
    guesses.find_continuation([1, 2, *[0] * 8], MOST)
    assert ranks.num_begun == 1
    guesses.find_continuation([1, 2, *[0] * 9], MOST)
    assert ranks.num_begun == 2


def deployment_of(machine: Machine | None = None, **options: Any) -> Deployment:
    speculation = {"model": "demo-draft", "num_speculative_tokens": 4, "draft_ranks": 1}
    config = EngineConfig.from_options(model="demo", speculative_config=json.dumps(speculation), **options)
    return resolve_here(config, machine)


def demo_requests(count: int) -> list[Request]:
    """Questions that the demo model and its draft model know."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    lines = (DEMO / "conversations.jsonl").read_text().splitlines()[:count]
    texts = [f"<|begin|><|user|>{json.loads(line)['question']}<|end|><|assistant|>" for line in lines]
    sampling = SamplingParams(temperature=0.0, max_tokens=48)
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=tokenizer.encode(text, add_special_tokens=False).ids,
            sampling=sampling,
            eos_token_ids=(2,),
        )
        for number, text in enumerate(texts)
    ]


def patient(guesses: Guesses, tokens: Sequence[int], limit: int) -> list[int]:
    """`find_continuation`, which waits until there are guesses."""
    deadline = time.monotonic() + 20
    while not (found := _find(guesses, tokens, limit)) and guesses._continuation and time.monotonic() < deadline:
        time.sleep(0.0005)
    return found


_find = Guesses.find_continuation


def answers_of(
    deployment: Deployment, ranks: DraftRanks | None, requests: list[Request]
) -> tuple[list[list[int]], Any]:
    executor = make_executor(deployment)
    executor.start()
    engine = Engine(deployment, executor, draft_ranks=ranks)
    with drafts_allowed():
        answers: dict[str, Answer] = run(engine, requests, "together")
    stats = engine.stats().drafts
    engine.close()
    executor.close()
    return [answers[request.request_id].token_ids for request in requests], stats


def test_tokens_are_those_without_drafts_also_after_the_ranks_have_died(caplog: pytest.LogCaptureFixture) -> None:
    deployment = deployment_of(cpu_threads=1)
    assert deployment.drafting is not None
    assert deployment.draft is None
    requests = demo_requests(4)
    alone, nothing = answers_of(msgspec.structs.replace(deployment, drafting=None), None, requests)
    assert nothing is None
    ranks = DraftRanks(deployment.drafting)
    try:
        assert any("demo-draft" in line for line in ranks.wait_ready())
        with patch.object(Guesses, "find_continuation", patient):
            drafted, stats = answers_of(deployment, ranks, requests)
        assert drafted == alone
        assert stats.num_accepted > 0.5 * stats.num_tokens > 0
        child = ranks._client._child
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while not ranks._has_failed and time.monotonic() < deadline:
            time.sleep(0.005)
        drafted, stats = answers_of(deployment, ranks, requests)
        assert drafted == alone
        assert stats.num_tokens == 0
        assert [record.message for record in caplog.records if "draft model have failed" in record.message]
    finally:
        ranks.close()


@pytest.mark.parametrize(("tensor", "replicas", "cores"), [(1, 1, (4, 4)), (3, 1, (6, 2)), (2, 2, (6, 1))])
def test_cores_and_memory_are_shared(tensor: int, replicas: int, cores: tuple[int, int]) -> None:
    """Of 8 cores, ranks of both models get equal parts, and the memory of the draft models is not counted twice."""
    machine = Machine((Host("here", 8 << 30, 8, (Device("cpu", "CPU", 8 << 30, 8 << 30, cores=8),)),))
    deployment = deployment_of(machine, tensor_parallel_size=tensor, data_parallel_size=replicas)
    drafting = deployment.drafting
    assert drafting is not None
    assert drafting.role == "draft"
    assert isinstance(pool := drafting.cache.pool, FixedPool)  # noqa: RUF018
    taken = drafting.weights[0].num_bytes + pool.num_blocks * drafting.cache.block_bytes[0]
    [left], [given] = deployment.machine.hosts, drafting.machine.hosts
    assert (left.cores, given.cores) == cores
    assert left.free_memory == (8 << 30) - replicas * taken
    assert given.free_memory == (8 << 30) // replicas


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"draft_tensor_parallel_size": 2}, "leave draft_tensor_parallel_size 2 out"),
        ({"draft_ranks": 0}, "draft_ranks of speculative_config must be a whole number from 1 to 64, got 0"),
        ({"method": "eagle"}, "unknown key 'draft_ranks'"),
    ],
)
def test_what_ranks_of_their_own_cannot_have(options: dict[str, object], says: str) -> None:
    asked = {"model": "demo-draft", "num_speculative_tokens": 4, "draft_ranks": 1} | options
    with pytest.raises(ValueError, match=says):
        EngineConfig.from_options(model="demo", speculative_config=json.dumps(asked)).scheduler.speculation  # noqa: B018


def test_several_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="draft_ranks of speculative_config work on one host only so far"):
        deployment_of(nnodes=2, node_rank=0, master_addr="127.0.0.1")


def test_a_server_says_what_its_draft_ranks_are() -> None:
    speculation = {"model": "demo-draft", "num_speculative_tokens": 4, "draft_ranks": 1}
    with closing(LLM("demo", speculative_config=speculation, cpu_threads=1)) as llm:
        [output] = llm.generate("Return the", SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
        report = [line for replica in llm._replicas.wait_ready() for line in replica.report]
    assert output.outputs[0].token_ids
    lines = [line for line in report if line.startswith("draft model: ")]
    assert "demo-draft" in lines[0]
    assert any("rank 0" in line for line in lines)
