"""`shardline top` against a server that comes and goes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from shardline.cli.commands.top import Watch, sparkline
from shardline.cli.main import main

RATES = {
    "running": 3, "waiting": 1, "kv_usage": 0.25, "generation_tokens_per_second": 12.5,
    "prompt_tokens_per_second": 80.0, "hit_rate": None, "step_seconds": 0.01,
}  # fmt: skip


def rank(number: int, busy: float, waiting: float, host: int = 0) -> dict[str, Any]:
    return {
        "rank": number, "host": host, "device": "CPU", "pid": 1, "threads": 1, "dp": 0, "pp": 0, "tp": number, "cp": 0,
        "layers": [0, 3], "weight_bytes": 1 << 20, "kv_bytes": 2 << 20, "busy": busy, "waiting": waiting,
        "step_seconds": busy / 10,
    }  # fmt: skip


SEEN = {
    "model": "m", "state": "ready", "uptime_seconds": 4000.0, "rates": RATES, "notices": ["rank 1 waits"],
    "first_token": {"count": 1, "p50": 0.12, "p95": 1.5}, "hosts": [{"name": "left"}, {"name": "right"}],
    "replicas": [
        {"index": 0, "alive": True, "rates": RATES, "ranks": [rank(0, 0.2, 0.1), rank(1, 0.9, 0.0, host=1)]},
        {"index": 1, "alive": False, "rates": RATES, "ranks": [], "backend": "http://b:8000"},
    ],
    "backends": [
        {"url": "http://b:8000", "state": "down", "problem": "no connection", "requests": 0, "has_view": False}
    ],
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    status = 200
    body = json.dumps(SEEN).encode()

    def do_GET(self) -> None:
        assert self.path == "/cluster?history=false"
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def drawn(watch: Watch, width: int = 160) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(watch.picture(width, with_keys=True))
    return captured.get()


def test_once_as_json_and_for_people(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", url, "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == SEEN
    assert main(["top", url, "--once"]) == 0
    out = capsys.readouterr().out
    assert "12.5 tokens/s" in out
    assert "! rank 1 waits" in out


def test_a_picture_has_ranks_backends_and_what_is_down(url: str) -> None:
    watch = Watch(url, None, "rank")
    watch.look()
    text = drawn(watch)
    for part in ("up 1 h 6 min", "first token 120.0 ms, p95 1.50 s", "left", "right", "down", "no connection", "q end"):
        assert part in text


def test_a_rank_is_one_line_also_on_a_narrow_terminal(url: str) -> None:
    watch = Watch(url, None, "rank")
    for _ in range(60):
        watch.look()
    assert watch.seen is not None
    watch.seen["hosts"][0]["name"] = "a-host-with-a-long-name.example.org"
    for own in watch.seen["replicas"][0]["ranks"]:
        own["device"] = "NVIDIA H100 80GB HBM3"
    for width, has_memory in ((80, False), (119, False), (120, True), (160, True)):
        lines = drawn(watch, width).splitlines()
        [head] = [number for number, line in enumerate(lines) if "replica" in line]
        assert head == 4, "two lines of the whole, a notice and a backend"
        assert "KV use" in lines[head]
        assert ("memory" in lines[head]) is has_memory
        assert all(line.split()[1] == str(rank) for rank, line in enumerate(lines[head + 1 : head + 3]))


def test_rows_are_sorted_by_keys(url: str) -> None:
    watch = Watch(url, None, "rank")
    watch.look()
    assert [row["rank"] for row in watch.rows()] == [0, 1, -1]
    watch.press("b")
    assert [row["rank"] for row in watch.rows()] == [1, 0, -1]
    watch.press("b")
    assert [row["rank"] for row in watch.rows()] == [-1, 0, 1]
    watch.press("x")
    assert [row["rank"] for row in watch.rows()] == [-1, 0, 1]
    watch.press("h")
    assert [row["where"] for row in watch.rows()] == ["http://b:8000", "left", "right"]


def test_it_survives_a_server_that_goes_and_comes_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(url, None, "rank")
    watch.try_to_look()
    monkeypatch.setattr(Handler, "status", 503)
    watch.try_to_look()
    gone = drawn(watch)
    assert "trying again" in gone
    assert "gone" in gone
    assert "left" in gone
    monkeypatch.setattr(Handler, "status", 200)
    monkeypatch.setattr(Handler, "body", b"<html>")
    watch.try_to_look()
    assert "has not said what /cluster must say" in drawn(watch)
    monkeypatch.undo()
    watch.try_to_look()
    assert "trying again" not in drawn(watch)


def test_into_a_pipe_comes_a_picture_at_each_look(url: str) -> None:
    words = [sys.executable, "-m", "shardline.cli.main", "top", url, "--interval", "0.1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines: list[str] = []
        while sum("12.5 tokens/s" in line for line in lines) < 2:
            lines.append(process.stdout.readline())
            assert lines[-1], "it has ended"
        times = [line for line in lines if re.fullmatch(r"\d\d:\d\d:\d\d\n", line)]
        assert len(times) == 2
        assert "\x1b" not in "".join(lines)
        process.stdout.close()  # as head does
        assert process.wait(60.0) == 141
        assert process.stderr.read() == ""


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://127.0.0.1:1"
    for words in (["ftp://x"], ["http://127.0.0.1:99999"], [url, "--json"], [url, "--interval", "0"]):
        assert main(["top", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["top", "http://127.0.0.1:1", "--once"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_sparklines_scale_to_the_largest() -> None:
    assert sparkline([0.0, 5.0, 10.0]) == "▁▅█"
    assert sparkline([]) == ""
