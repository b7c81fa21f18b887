"""The official client with TP 2 x PP 2 x DP 2 in real processes: answers and deaths."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import Server, serve

QUESTION: list[Any] = [{"role": "user", "content": "What does os.path.join do?"}]
LONG: dict[str, Any] = {"prompt": "os.path.join:", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("-tp", "2", "-pp", "2", "-dp", "2") as server:
        yield server


def test_startup_log(server: Server) -> None:
    for line in (
        "layout: tensor 2 x pipeline 2 = 4 ranks a replica, 2 replicas",
        "pp 1 (layers 4-7), tp 1",
        "CPU KV cache size: ",
        "Maximum concurrency for 2,048 tokens per request: ",
        "listening on 127.0.0.1 only: other machines cannot connect; pass --host 0.0.0.0 to serve them",
    ):
        assert line in server.output
    assert len(set(server.rank_pids)) == 8


def test_processes_carry_titles(server: Server) -> None:
    processes = subprocess.run(["ps", "-o", "args=", "-p", str(server.process.pid)], capture_output=True, text=True)
    assert processes.stdout.strip() == "shardline: front"
    engines = {Path(f"/proc/{pid}/stat").read_text().split(") ")[-1].split()[1] for pid in server.rank_pids}
    assert {title_of(int(pid)) for pid in engines} == {"shardline: engine 0", "shardline: engine 1"}
    assert {title_of(pid) for pid in server.rank_pids} == {
        f"shardline: rank {2 * stage + rank} (dp {replica} pp {stage} tp {rank})"
        for replica in range(2)
        for stage in range(2)
        for rank in range(2)
    }


def title_of(pid: int) -> str:
    """What `ps` shows of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()


def test_streamed_and_whole_answers_are_one(server: Server) -> None:
    client = server.client()
    whole = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0.0)
    assert "Join two or more pathname components" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0.0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}


def test_choices_differ_and_seeds_repeat(server: Server) -> None:
    def ask() -> list[str]:
        answer = server.client().completions.create(
            model="demo", prompt="json", n=3, seed=5, temperature=1.5, max_tokens=20, logprobs=2
        )
        assert all(choice.logprobs.tokens for choice in answer.choices if choice.logprobs)
        return [choice.text for choice in answer.choices]

    first = ask()
    assert len(set(first)) == 3
    assert ask() == first


def test_stop(server: Server) -> None:
    answer = server.client().chat.completions.create(model="demo", messages=QUESTION, temperature=0.0, stop=["path"])
    assert answer.choices[0].message.content == "Join two or more "
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "demo", "prompt": "x " * 5000}, 400, "2048"),
        ({"model": "nobody", "prompt": "x"}, 404, "nobody"),
        ({"model": "demo", "prompt": "x", "temprature": 1}, 400, "temprature"),
        ({"model": "demo", "prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
        ({"model": "demo", "prompt": [99999999]}, 400, "99999999"),
        ({"model": "demo", "prompt": "x", "temperature": -1}, 400, "temperature"),
    ],
)
def test_bad_requests_are_told_and_hurt_nobody(server: Server, body: dict[str, object], status: int, says: str) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == status
    assert says in response.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_ranks_count_their_time(server: Server) -> None:
    body = {"model": "demo", "prompt": "json", "max_tokens": 200, "ignore_eos": True}

    def has_counted() -> bool:
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0).raise_for_status()
        return server.metric("rank_busy_seconds_total") > 0 and server.metric("rank_waiting_seconds_total") > 0

    server.wait_until(has_counted, "ranks have been seen to compute and to wait", 60)
    assert server.metric("rank_steps_total") > 0
    seen = httpx.get(f"{server.url}/cluster").json()
    assert [host["cores"] > 0 for host in seen["hosts"]] == [True]
    assert [[(rank["rank"], rank["pp"], rank["tp"]) for rank in one["ranks"]] for one in seen["replicas"]] == [
        [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    ] * 2
    ranks = [rank for one in seen["replicas"] for rank in one["ranks"]]
    assert sorted(rank["pid"] for rank in ranks) == sorted(server.rank_pids)
    assert {tuple(rank["layers"]) for rank in ranks} == {(0, 3), (4, 7)}
    assert all(0.0 <= rank["busy"] + rank["waiting"] <= 1.001 for rank in ranks)
    assert any(rank["step_seconds"] for rank in ranks)


def test_streams_outlive_a_rank(server: Server) -> None:
    """Runs last in this module, because it kills a rank of one replica."""
    client = server.client()
    asked = {**LONG, "max_tokens": 150}
    streams = [client.completions.create(model="demo", stream=True, temperature=0.0, **asked) for _ in range(2)]
    texts = [next(iter(stream)).choices[0].text for stream in streams]
    os.kill(server.rank_pids[1], signal.SIGKILL)
    for index, stream in enumerate(streams):
        for chunk in stream:
            texts[index] += chunk.choices[0].text
            end = chunk.choices[0].finish_reason
        assert end == "length"
    assert texts[0] == texts[1]
    assert "rank 1 (pp 0, tp 1)" in server.output
    assert "signal 9" in server.output
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0.0)
    assert "Join two or more pathname components" in (answer.choices[0].message.content or "")
