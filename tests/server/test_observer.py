"""Where the time of a request went: in answers, at /requests/{id}, and in the metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from shardline.config.server import ServerConfig
from shardline.messages.timeline import ChoiceMetrics, EngineTimeline, Preemption, PrefillChunk, RequestMetrics
from shardline.metrics.names import SHARED_NAMES
from shardline.server.observer import RequestLog
from tests.server.conftest import Running, serve, wait_until

DEPLOY = Path(__file__).parents[2] / "deploy" / "grafana"
VLLM_NAMES = Path(__file__).parents[1] / "benchmark" / "vllm_bench.json"
TIMELINE = EngineTimeline(
    0.012, 0.092, [PrefillChunk(0, 64, 0.012, 0.04), PrefillChunk(64, 36, 0.052, 0.04)], [Preemption(0.2, 101, 0.05)]
)


@pytest.fixture
def timed(shared: Running) -> Running:
    shared.engine.timeline = TIMELINE
    return shared


def check(metrics: dict[str, Any], tokens: int) -> None:
    [choice] = metrics["choices"]
    assert choice["queued_seconds"] == pytest.approx(0.012)
    assert choice["prefill_seconds"] == pytest.approx(0.08)
    assert choice["prefill_chunks"][1] == {"start": 64, "num_tokens": 36, "at": 0.052, "seconds": 0.04}
    assert choice["preemptions"] == [{"at": 0.2, "num_lost_tokens": 101, "seconds": 0.05}]
    assert choice["num_generation_tokens"] == tokens
    assert 0 < choice["first_token_seconds"] < 5
    assert choice["decode_seconds"] >= 0
    assert choice["summary"].startswith("queued 12 ms, prefill 80 ms (2 chunk(s)), first token after")
    assert "1 preemption(s) 50 ms" in choice["summary"]


def test_in_the_answer_and_at_requests(timed: Running, http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "return_metrics": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    check(answer["metrics"], 3)
    found = http.get(f"/requests/{answer['id']}").json()
    assert (found["status"], found["id"]) == ("finished", answer["id"])
    check(found, 3)
    assert "Hi" not in json.dumps(found)
    plain = http.post("/v1/chat/completions", json={**body, "return_metrics": False}).json()
    assert "metrics" not in plain
    assert http.get("/requests/chatcmpl-unknown").status_code == 404


@pytest.mark.parametrize("usage", [True, False])
def test_in_a_stream(timed: Running, http: httpx.Client, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    for path, prompt in (
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("completions", {"prompt": "a"}),
    ):
        body = {**prompt, "max_tokens": 3, "stream": True, "return_metrics": True, **options}
        text = http.post(f"/v1/{path}", json=body).text
        events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
        assert [event for event in events if "metrics" in event] == events[-1:]
        check(events[-1]["metrics"], 3)
        assert ("usage" in events[-1]) == usage


def test_a_running_request_is_found(timed: Running, http: httpx.Client) -> None:
    timed.engine.paused = True
    with http.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True, "max_tokens": 2}):
        wait_until(lambda: bool(timed.service.observer.log._running))
        [request_id] = timed.service.observer.log._running
        found = http.get(f"/requests/{request_id}").json()
        assert found["status"] == "running"
        assert found["choices"][0]["first_token_seconds"] is None
        timed.engine.resume()
    wait_until(lambda: http.get(f"/requests/{request_id}").json()["status"] == "finished")


class EndedStream:
    def __init__(self, choices: int = 1) -> None:
        self._choices = choices

    def metrics(self) -> RequestMetrics:
        choice = ChoiceMetrics(
            index=0,
            finish_reason="stop",
            num_generation_tokens=1,
            num_cached_tokens=0,
            queued_seconds=0.0,
            prefill_seconds=0.0,
            first_token_seconds=0.0,
            decode_seconds=0.0,
            prefill_chunks=TIMELINE.prefill_chunks,
            preemptions=TIMELINE.preemptions,
        )
        return RequestMetrics(arrival_time=1.0, choices=[choice] * self._choices)


def test_the_log_is_bounded() -> None:
    log = RequestLog(3)
    for index in range(5):
        log.begin(str(index), [EndedStream()])  # type: ignore[list-item]
        log.end(str(index))
    assert [log.find(str(index)) is not None for index in range(5)] == [False, False, True, True, True]
    assert log.end("never begun") == []


def test_the_log_is_bounded_by_choices() -> None:
    """Each of them has four entries: itself, two parts of its prefill, and a preemption."""
    log = RequestLog(max_entries=100)
    for index, choices in enumerate((5, 10, 10)):
        log.begin(str(index), [EndedStream(choices // 5) for _ in range(5)])  # type: ignore[misc]
        log.end(str(index))
    assert [log.find(str(index)) is not None for index in range(3)] == [True, True, True]
    log.begin("one more", [EndedStream()])  # type: ignore[list-item]
    log.end("one more")
    assert [log.find(str(index)) is not None for index in range(3)] == [False, True, True]
    log.begin("too large", [EndedStream(26)])  # type: ignore[list-item]
    assert len(log.end("too large")[0].choices) == 26
    assert log.find("too large") is None
    log.begin("small", [EndedStream(25)])  # type: ignore[list-item]
    log.end("small")
    assert log.find("small") is not None


def test_it_needs_the_admin_key() -> None:
    with serve(ServerConfig(api_key=("user",), admin_api_key="boss")) as running, running.http() as http:
        for key, status in ((None, 401), ("user", 401), ("boss", 404)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            assert http.get("/requests/x", headers=headers).status_code == status


def scraped_names(prefix: str) -> set[str]:
    """The series of a server that has answered requests."""
    with serve(ServerConfig(metrics_prefix=prefix)) as running, running.http() as http:
        running.engine.timeline = TIMELINE
        assert http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3}).status_code == 200
        text = http.get("/metrics").text
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if line and not line.startswith("#")}


def test_dashboard_and_alerts_name_series_that_exist() -> None:
    names = scraped_names("shardline")
    dashboard = json.loads((DEPLOY / "shardline.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += re.findall(r"expr: (.*)", (DEPLOY / "alerts.yaml").read_text())
    expressions.append(dashboard["templating"]["list"][1]["query"])
    assert len(expressions) > 30
    for expression in expressions:
        wanted = set(re.findall(r"shardline:\w+", expression))
        assert wanted, expression
        assert wanted <= names, expression


def test_vllm_names() -> None:
    known = set(json.loads(VLLM_NAMES.read_text())["metrics"])
    # These are named in sources that are not recorded.
    drafts = {name for name in SHARED_NAMES if name.startswith(("spec_decode_", "kv_offload_"))}
    assert {f"vllm:{name}" for name in SHARED_NAMES - drafts} <= known
    both, only = scraped_names("both"), scraped_names("vllm")
    tier = {name for name in SHARED_NAMES if name.startswith("external_prefix_cache_")}
    for name in SHARED_NAMES - drafts - tier:
        assert any(one.startswith(f"vllm:{name}") for one in only), name
        assert any(one.startswith(f"shardline:{name}") for one in both), name
        assert not any(one in (f"shardline:{name}", f"shardline:{name}_count") for one in only), name
    assert "shardline:num_steps_total" in only
    assert "vllm:cache_config_info" in both
