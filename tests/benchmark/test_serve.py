"""`shardline bench serve` against servers with known times."""

from __future__ import annotations

import json
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from shardline.benchmark.backends import RecordingExchange
from shardline.benchmark.http_client import Exchange, HttpClient
from shardline.benchmark.load import _Sender
from shardline.benchmark.workload import Record
from shardline.cli.main import main
from tests.benchmark.stub_server import CLOSE, HEAD, Script, event, stream, stub_server, whole

pytestmark = pytest.mark.slow


def bench(url: str, words: str, tmp_path: Path, code: int = 0) -> dict[str, Any]:
    """The result of a run on the demo's tokenizer."""
    path = tmp_path / "result.json"
    base = f"bench serve --base-url {url} --model demo --disable-tqdm --save-detailed --output-json {path}"
    small = "--random-input-len 8 --random-output-len 4"
    assert main([*base.split(), *small.split(), *words.split()]) == code
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_figures_are_those_of_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server(lambda index, path, body: stream(4, 0.05, 0.02)) as server:
        result = bench(
            server.url, "--num-prompts 6 --max-concurrency 2 --percentile-metrics ttft,tpot,itl,e2el", tmp_path
        )
    assert server.most_running == 2
    assert (result["completed"], result["failed"], result["failures"]) == (6, 0, {})
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (42, 24)
    # Sleeps may be long on a busy machine, but never short.
    assert 48 <= result["median_ttft_ms"] <= 500
    assert 18 <= result["median_tpot_ms"] <= 300
    assert 18 <= result["median_itl_ms"] <= 300
    assert 105 <= result["median_e2el_ms"] <= 1000
    # A closed loop intends to send a request when another one has ended.
    assert abs(result["median_e2el_from_intended_ms"] - result["median_e2el_ms"]) < 50
    assert result["output_throughput"] == pytest.approx(24 / result["duration"])
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ("demo", 4, True, True)
    ids = [line for head in server.headers for line in head.split("\r\n") if line.startswith("x-request-id: ")]
    assert len({uuid.UUID(line.removeprefix("x-request-id: ")) for line in ids}) == len(ids) > 0
    assert "Serving Benchmark Result" in capsys.readouterr().out


def test_each_request_names_an_adapter(tmp_path: Path) -> None:
    with stub_server(lambda index, path, body: stream(1)) as server:
        turns = "--num-prompts 5 --max-concurrency 1 --lora-modules a b --lora-assignment round-robin"
        bench(server.url, turns, tmp_path)
        assert [body["model"] for body in server.bodies] == ["a", "b", "a", "b", "a"]
        del server.bodies[:]
        bench(server.url, "--num-prompts 12 --lora-modules a b", tmp_path)
        assert {body["model"] for body in server.bodies} == {"a", "b"}


def test_accepted_drafts_are_those_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def page(drafts: int, tokens: int, *accepted: int) -> str:
        lines = [
            "# TYPE shardline:spec_decode_num_drafts counter",
            f'shardline:spec_decode_num_drafts_total{{engine="0"}} {drafts}.0',
            'shardline:spec_decode_num_drafts_total{engine="1"} 5.0',
            f"vllm:spec_decode_num_draft_tokens_total {tokens}",
            f"shardline:spec_decode_num_accepted_tokens_total {sum(accepted)}.0",
        ]
        name = "shardline:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{engine="0",position="{index}"}} {count}.0' for index, count in enumerate(accepted)]
        return "\n".join(lines)

    with stub_server(lambda index, path, body: stream(2)) as server:
        server.metrics = [page(1, 2, 1, 0), page(5, 12, 4, 1)]
        result = bench(server.url, "--num-prompts 2", tmp_path)
    assert result["spec_decode_num_drafts"] == 4
    assert result["spec_decode_acceptance_rate"] == pytest.approx(40.0)
    assert result["spec_decode_acceptance_length"] == pytest.approx(2.0)
    assert result["spec_decode_per_position_acceptance_rates"] == [0.75, 0.25]
    assert "  Position 1:                            25.00" in capsys.readouterr().out
    with stub_server(lambda index, path, body: stream(2)) as server:
        assert "spec_decode_num_drafts" not in bench(server.url, "--num-prompts 2", tmp_path)


def test_the_bubble_is_the_time_in_which_ranks_were_not_busy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def page(*seconds: tuple[float, float]) -> str:
        return "\n".join(
            f'shardline:rank_{kind}_seconds_total{{engine="0",model_name="m",rank="{rank}"}} {value}'
            for rank, both in enumerate(seconds)
            for kind, value in zip(("busy", "waiting"), both, strict=True)
        )

    def slow(index: int, path: str, body: object) -> Script:
        time.sleep(0.1)
        return stream(2)

    with stub_server(slow) as server:
        server.metrics = [page((1.0, 1.0), (2.0, 3.0)), page((1.05, 1.0), (2.02, 3.01))]
        result = bench(server.url, "--num-prompts 2", tmp_path)
    seconds = result["duration"]
    assert result["ranks"] == ["0/0", "0/1"]
    assert result["rank_busy_shares"] == pytest.approx([0.05 / seconds, 0.02 / seconds])
    assert result["rank_waiting_shares"] == pytest.approx([0.0, 0.01 / seconds])
    assert result["bubble"] == pytest.approx(1 - 0.035 / seconds)
    assert "Rank 0/1 busy, waiting (%):" in capsys.readouterr().out
    with stub_server(lambda index, path, body: stream(2)) as server:
        server.metrics = [page((1.0, 0.0)), page((2.0, 0.0))]
        assert "bubble" not in bench(server.url, "--num-prompts 2", tmp_path)


def test_sends_follow_absolute_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = HttpClient.send

    def slow_send(self: HttpClient, exchange: Exchange) -> None:
        time.sleep(0.005)
        real(self, exchange)

    monkeypatch.setattr(HttpClient, "send", slow_send)
    # A client that slept between sends would be 150 ms late in the end. On a busy machine, this one may be for once.
    for _ in range(3):
        with stub_server(lambda index, path, body: stream(1)) as server:
            result = bench(server.url, "--num-prompts 30 --request-rate 100 --burstiness inf", tmp_path)
        assert result["request_rate"] == 100
        if result["start_times"][-1] - result["start_times"][0] < 0.38:
            return
    raise AssertionError("the send times drift")


def test_a_late_answer_counts_from_the_intended_time(tmp_path: Path) -> None:
    # One at a time, 50 ms each, but 100 requests/s are wanted: requests queue at the client.
    words = "--num-prompts 10 --request-rate 100 --burstiness inf --max-concurrency 1 --goodput ttft:100 e2el:200"
    with stub_server(lambda index, path, body: stream(1, 0.05)) as server:
        result = bench(server.url, words + " --percentile-metrics ttft,client_queue_time", tmp_path)
    assert result["p99_ttft_from_intended_ms"] > result["p99_ttft_ms"] + 200
    assert result["p99_client_queue_time_ms"] > 300
    good = sum(1e3 * (ttft + queue) <= 100 for ttft, queue in zip(result["ttfts"], result["queue_times"], strict=True))
    assert good < 10
    assert result["request_goodput"] == pytest.approx(good / result["duration"])
    assert result["p99_send_lateness_ms"] < 150, "the requests waited for their turn, not for the client"


def test_a_slow_client_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    read = RecordingExchange.on_end

    def slow_end(self: RecordingExchange, now: float) -> None:
        time.sleep(0.02)
        read(self, now)

    monkeypatch.setattr(RecordingExchange, "on_end", slow_end)
    with stub_server(lambda index, path, body: stream(1)) as server:
        result = bench(server.url, "--num-prompts 30 --request-rate 200", tmp_path)
    assert result["client_limited"]
    assert result["p99_send_lateness_ms"] > 5
    assert "The client is the limit" in capsys.readouterr().out


def test_failures_are_counted_by_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = event({"error": {"message": "engine died", "code": 500}})
    answers: list[Script] = [
        stream(3),
        [(0.0, whole({"error": {"message": "too many"}}, "429 Too Many Requests"))],
        [(0.0, HEAD + event({"choices": [{"text": "x"}]})), (0.0, CLOSE)],
        [(0.0, HEAD + broken + b"0\r\n\r\n")],
        [(0.0, HEAD + event("[DONE]") + b"0\r\n\r\n")],
        [(0.0, b"nonsense\r\n\r\n")],
        [(0.0, whole({"error": {}}, "429 Too Many Requests"))],
    ]
    with stub_server(lambda index, path, body: answers[index]) as server:
        result = bench(server.url, "--num-prompts 7 --max-concurrency 1", tmp_path)
    assert result["failures"] == {
        "HTTP 429": 2,
        "connection closed": 1,
        "error in the stream": 1,
        "no output": 1,
        "malformed answer": 1,
    }
    assert (result["completed"], result["failed"]) == (1, 6)
    assert "too many" in result["errors"][1]
    shown = capsys.readouterr().out
    assert "HTTP 429:" in shown
    assert 'The first failure: {"error": {"message": "too many"}}' in shown


def test_a_kept_connection_that_the_server_has_closed_is_replaced(tmp_path: Path) -> None:
    def answer(index: int, path: str, body: Any) -> Script:
        return [*stream(1), (0.0, CLOSE)] if index == 0 else stream(1)

    with stub_server(answer) as server:
        result = bench(server.url, "--num-prompts 2 --request-rate 20 --burstiness inf", tmp_path)
    assert result["completed"] == 2


def test_chat_and_model_from_the_server(tmp_path: Path) -> None:
    def answer(index: int, path: str, body: Any) -> Script:
        if path == "/v1/models":
            return [(0.0, whole({"data": [{"id": "short-name", "root": "demo"}]}))]
        assert path == "/v1/chat/completions"
        return stream(2, chat=True)

    path = tmp_path / "result.json"
    words = "--backend openai-chat --num-prompts 2 --random-input-len 8 --disable-tqdm --temperature 0.5"
    with stub_server(answer) as server:
        assert main(f"bench serve --base-url {server.url} {words} --output-json {path}".split()) == 0
    assert server.bodies[1]["model"] == "short-name"
    assert server.bodies[1]["messages"][0]["role"] == "user"
    assert isinstance(server.bodies[1]["messages"][0]["content"], str)
    assert server.bodies[1]["temperature"] == 0.5
    assert json.loads(path.read_text())["model_id"] == "demo"


def test_embeddings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usage = {"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 20, "total_tokens": 20}}
    with stub_server(lambda index, path, body: [(0.01, whole(usage))]) as server:
        result = bench(server.url, "--backend openai-embeddings --num-prompts 4 --random-batch-size 2", tmp_path)
    assert len(server.bodies[0]["input"]) == 2
    assert (result["completed"], result["total_input_sequences"], result["total_input_tokens"]) == (2, 4, 40)
    assert "mean_ttft_ms" not in result
    assert "Input throughput (inputs/s):" in capsys.readouterr().out


def test_runs_compare_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pauses = {"a": 0.01, "b": 0.04}
    for name, pause in pauses.items():
        with stub_server(partial(lambda script, *_: script, stream(3, pause, pause))) as server:
            words = f"--num-prompts 8 --max-concurrency 4 --num-runs 3 --html {tmp_path / 'page.html'}"
            result = bench(server.url, words, tmp_path)
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
        assert (result["num_runs"], len(result["runs"])) == (3, 3)
        assert 0 < result["confidence"]["median_ttft_ms"] < result["median_ttft_ms"]
        prompts = [body["prompt"] for body in server.bodies]
        assert len(set(prompts)) == 24, "a run must not find the prompts of another one in the prefix cache"
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 5
    assert "http://" not in page
    assert "<script src" not in page
    assert "Mean of 3 Runs, 95% Confidence" in capsys.readouterr().out
    assert main(["bench", "serve", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    lines = {line[:30].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert lines["median ttft (ms)"].endswith("worse")
    assert lines["output tokens/s"].endswith("worse")
    assert main(["bench", "serve", "--compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0
    assert "within the noise" in capsys.readouterr().out


def test_results_are_appended(tmp_path: Path) -> None:
    words = f"--num-prompts 1 --append-result --result-dir {tmp_path} --result-filename all.json --metadata tp=2"
    with stub_server(lambda index, path, body: stream(1)) as server:
        for _ in range(2):
            bench(server.url, words, tmp_path)
    first, second = (json.loads(line) for line in (tmp_path / "all.json").read_text().splitlines())
    assert first["tp"] == second["tp"] == "2"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--model demo --port 1", 1, "cannot connect to http://127.0.0.1:1"),
        ("--port 1", 1, "cannot connect to http://127.0.0.1:1"),
        ("--request-rate 0", 2, "--request-rate must be more than 0"),
        ("--seed -1", 2, "--seed must be at least 0, got -1"),
        ("--save-result --result-dir /dev/null/x", 2, "--result-dir /dev/null/x cannot be made: Not a directory"),
        ("--output-json /", 2, "/ is a folder: name a file in it"),
        ("--max-concurrency 0", 2, "--max-concurrency must be at least 1"),
        ("--ramp-up-strategy linear", 2, "--ramp-up-start-rps"),
        ("--goodput ttft", 2, "--goodput takes ttft, tpot, e2el"),
        ("--goodput ttft:nan", 2, "--goodput takes ttft, tpot, e2el"),
        ("--temperature nan", 2, "--temperature must be a number, got nan"),
        ("--extra-body []", 2, "--extra-body takes a JSON object"),
        ("--percentile-metrics speed", 2, "no metric 'speed'"),
        ("--backend openai-chat --endpoint /v1/completions/x", 2, "chat/completions"),
        ("--self-timed", 2, "timed_trace"),
        ("--base-url ftp://x", 2, "http://127.0.0.1:8000"),
        ("--compare a.json b.json", 2, "a.json"),
        ("--lora-modules", 2, "--lora-modules"),
        ("--lora-modules a --lora-assignment first", 2, "--lora-assignment"),
        ("--use-beam-search", 2, "--extra-body"),
    ],
)
def test_bad_input_is_one_line(words: str, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        found = main(["bench", "serve", *words.split()])
    except SystemExit as exit:
        found = int(str(exit.code))
    error = capsys.readouterr().err
    assert found == code, error
    assert message in error
    assert error.count("\n") == 1


def test_if_every_request_fails_the_command_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server(lambda index, path, body: [(0.0, whole({"error": "no"}, "401 Unauthorized"))]) as server:
        bench(server.url, "--num-prompts 2", tmp_path, code=1)
    assert 'every request failed: HTTP 401: {"error": "no"}' in capsys.readouterr().err
    silent = b"HTTP/1.1 418 I am a teapot\r\nContent-Length: 0\r\n\r\n"
    with stub_server(lambda index, path, body: [(0.0, silent)]) as server:
        bench(server.url, "--num-prompts 2", tmp_path, code=1)
    assert "every request failed: HTTP 418: HTTP 418 I am a teapot" in capsys.readouterr().err


def test_the_servers_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is asked if the model is not on this host. Its tokens are characters here, and it adds a special one."""
    served: list[str] = []

    def answer(index: int, path: str, body: Any) -> Script:
        served.append(path)
        if path == "/v1/models":
            return [(0.0, whole({"data": [{"id": "smollm2"}]}))]
        if path == "/tokenize":
            assert body["model"] == "smollm2"
            return [(0.0, whole({"tokens": [1] * body["add_special_tokens"] + [ord(char) for char in body["prompt"]]}))]
        if path == "/detokenize":
            return [(0.0, whole({"prompt": "".join(map(chr, body["tokens"]))}))]
        prompts.append(body["prompt"])
        return stream(2)

    prompts: list[str] = []
    words = "--num-prompts 2 --random-input-len 8 --disable-tqdm --ready-check-timeout-sec 0"
    with stub_server(answer) as server:
        assert main(f"bench serve --base-url {server.url} {words}".split()) == 0
    assert [len(prompt) for prompt in prompts] == [7, 7]
    assert "".join(prompts).isprintable()
    assert len(set(prompts)) == 2


def test_no_tokenizer_anywhere(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with stub_server(lambda index, path, body: [(0.0, whole({"detail": "Not Found"}, "404 Not Found"))]) as server:
        assert main(f"bench serve --base-url {server.url} --model smollm2 --num-prompts 1".split()) == 2
    error = capsys.readouterr().err
    assert "the server has none either: /tokenize answers 404" in error
    assert "give --tokenizer FOLDER" in error


def test_in_a_closed_loop_a_request_is_intended_when_it_gets_a_place() -> None:
    client, done = Mock(), Mock()
    sender = _Sender(client, streams=True, max_concurrency=1, on_done=done)
    sender.closed_loop = True
    waiting, late = Record(1), Record(1)
    sender.submit(b"first", Record(1))
    sender.submit(b"waiting", waiting)
    for number in range(2):
        client.send.call_args_list[number].args[0].on_failure("cut", "", 0.0)
    sender.submit(b"late", late)
    assert client.send.call_count == 3
    assert 0.0 < waiting.intended == waiting.ready <= late.intended == late.ready
