"""`run-batch` over a fake engine: order, resuming, and where files come from and go to."""

from __future__ import annotations

import errno
import fcntl
import http.server
import json
import logging
import os
import re
import shutil
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardline.api.async_llm import AsyncLLM
from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from shardline.server.openai.batch import executor, run_file
from shardline.server.openai.batch.run_file import BatchFiles, run_batch
from tests.server.conftest import wait_until
from tests.server.fake_engine import FakeEngine, fake_llm


class Runs:
    """Runs over one fake engine after the other. `engine` is the latest."""

    engine: FakeEngine

    def __init__(self) -> None:
        self.prepare: Callable[[FakeEngine], None] = lambda engine: None

    def start_llm(self, config: EngineConfig) -> AsyncLLM:
        llm, self.engine = fake_llm(config)
        self.prepare(self.engine)
        self.engine.load.set()
        return llm

    def run(self, source: Path | str, output: Path | str, tmp_dir: Path | None = None, **options: Any) -> int:
        files = BatchFiles(str(source), str(output), None if tmp_dir is None else str(tmp_dir))
        engine = EngineConfig.from_options(on_failure="exit", **options)
        return run_batch(engine, ServerConfig(api_key=("secret",)), files, start_llm=self.start_llm)


@pytest.fixture
def runs() -> Runs:
    return Runs()


def request(number: int, **body: Any) -> str:
    entry = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p", **body}}
    return json.dumps(entry)


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ids(path: Path) -> list[str]:
    return [answer["custom_id"] for answer in read(path)]


def long(number: int) -> str:
    """A request that takes longer than others."""
    return request(number, ignore_eos=True, max_tokens=60)


def when_answered(output: Path, count: int, act: Callable[[], None]) -> None:
    """Call `act` on a thread as soon as the output has so many answers."""

    def watch() -> None:
        wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") >= count, 60)
        act()

    threading.Thread(target=watch).start()


def test_answers_are_in_the_order_of_the_requests(runs: Runs, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [long(1), *map(request, range(2, 40))])
    assert runs.run(source, tmp_path / "out", max_num_seqs=4) == 0
    assert ids(tmp_path / "out") == [f"r{number}" for number in range(1, 40)]
    answer = read(tmp_path / "out")[1]
    assert answer["response"]["status_code"] == 200
    assert answer["response"]["body"]["choices"][0]["text"].startswith("Hello")
    assert answer["error"] is None


def test_an_early_long_request_does_not_hold_up_others(runs: Runs, tmp_path: Path) -> None:
    long_one = request(1, ignore_eos=True, max_tokens=400)
    source = write(tmp_path / "in", [long_one, *(request(n, max_tokens=4) for n in range(2, 30))])
    ends: list[int | None] = []

    def note_ends(engine: FakeEngine) -> None:
        step = engine._step

        def noted(one: Any, left: list[int]) -> Any:
            output = step(one, left)
            if output.finish_reason is not None:
                ends.append(one.sampling.max_tokens)
            return output

        engine._step = noted  # type: ignore[method-assign, assignment]

    runs.prepare = note_ends
    assert runs.run(source, tmp_path / "out", max_num_seqs=2) == 0
    assert ends.index(400) == 28, "the long one was the last to end"
    assert ids(tmp_path / "out") == [f"r{number}" for number in range(1, 30)]


@pytest.mark.slow
def test_broken_lines_have_errors_and_an_exit_code(runs: Runs, tmp_path: Path) -> None:
    lines = [request(1), "{", "", request(2, stream=True), request(3, model="other"), request(4)]
    source = write(tmp_path / "in", lines)
    for _ in range(2):  # the second run finds all of it done
        assert runs.run(source, tmp_path / "out") == 1
        assert ids(tmp_path / "out") == ["r1", "line-2", "r2", "r3", "r4"]
    assert runs.engine.requests == []
    statuses = [answer["response"]["status_code"] for answer in read(tmp_path / "out")]
    assert statuses == [200, 400, 400, 404, 200]
    errors = [answer["error"] and answer["error"]["message"] for answer in read(tmp_path / "out")]
    assert errors[0] is None
    assert all(word in text for word, text in zip(("JSON", "stream", "other"), errors[1:4], strict=True))
    write(source, [line for line in lines if line != "{"])
    assert runs.run(source, tmp_path / "out2") == 0, "an endpoint's error is an answer"


def test_a_full_disk_is_one_line_and_ends_the_engine(runs: Runs, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request(1)])
    with pytest.raises(OSError, match=r"cannot write /dev/full: No space left on device; 0 of 1 requests are answered"):
        runs.run(source, "/dev/full")
    assert runs.engine._closed


def test_two_runs_do_not_write_one_file(runs: Runs, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in", [request(1)]), tmp_path / "out"
    with output.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"another run writes .*out: wait until it ends"):
            runs.run(source, output)
    assert runs.run(source, output) == 0
    assert ids(output) == ["r1"]


@pytest.mark.slow
def test_a_stopped_run_goes_on(runs: Runs, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [*map(request, range(1, 9)), *map(long, range(9, 30)), request(30)])
    output = tmp_path / "out"

    def stop_soon(engine: FakeEngine) -> None:
        engine.seconds_per_token = 0.01
        when_answered(output, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))

    runs.prepare = stop_soon
    assert runs.run(source, output, max_num_seqs=2) == 130
    done = output.read_bytes()
    num_done = done.count(b"\n")
    assert 5 <= num_done < 29
    output.write_bytes(done[:-20])  # the process was killed while it wrote
    runs.prepare = lambda engine: None
    assert runs.run(source, output, max_num_seqs=2) == 0
    assert ids(output) == [f"r{number}" for number in range(1, 31)]
    assert output.read_bytes().startswith(done[: done[:-20].rfind(b"\n")])
    assert len(runs.engine.requests) == 30 - (num_done - 1)


@pytest.mark.slow
def test_answers_to_other_requests_are_not_touched(runs: Runs, tmp_path: Path) -> None:
    output = tmp_path / "out"
    runs.run(write(tmp_path / "in", [request(1), request(2)]), output)
    before = output.read_bytes()
    for lines in ([request(1), request(3)], [request(1)]):
        with pytest.raises(ValueError, match=r"line 2 of .* is the answer to another request.*delete this one"):
            runs.run(write(tmp_path / "in", lines), output)
    assert output.read_bytes() == before
    for text in ("notes\n", "notes without a line break"):
        output.write_text(text)
        with pytest.raises(ValueError, match=r"line 1 of .* is no answer of a batch"):
            runs.run(tmp_path / "in", output)
        assert output.read_text() == text


@pytest.mark.slow
def test_a_dead_engine_leaves_what_is_done(runs: Runs, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request(1), *(request(n, ignore_eos=True, max_tokens=400) for n in range(2, 5))])
    output = tmp_path / "out"

    def die_soon(engine: FakeEngine) -> None:
        engine.seconds_per_token = 0.02
        when_answered(output, 1, lambda: engine.die("rank 1 was killed"))

    runs.prepare = die_soon
    with pytest.raises(RuntimeError, match=r"rank 1 was killed; 1 of 4 requests are answered; the same command"):
        runs.run(source, output)
    runs.prepare = lambda engine: None
    assert runs.run(source, output) == 0
    assert ids(output) == ["r1", "r2", "r3", "r4"]


def test_answers_that_wait_are_bounded(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "MAX_HELD_BYTES", 100)
    source = write(tmp_path / "in", [long(1), *map(request, range(2, 60))])
    assert runs.run(source, tmp_path / "out", max_num_seqs=2) == 0
    assert ids(tmp_path / "out") == [f"r{number}" for number in range(1, 60)]


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_requests(runs: Runs, tmp_path: Path, text: str) -> None:
    (tmp_path / "in").write_text(text)
    assert runs.run(tmp_path / "in", tmp_path / "out") == 0
    assert (tmp_path / "out").read_text() == ""
    assert not hasattr(runs, "engine"), "no model is loaded for it"


def test_ids_that_are_not_unique_are_refused_before_a_model_loads(runs: Runs, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request(1), request(2), request(1)])
    with pytest.raises(ValueError, match=r"--input-file .*in: each custom_id must be unique: 'r1' is in lines 1, 3$"):
        runs.run(source, tmp_path / "out")
    assert not hasattr(runs, "engine")


def test_wrong_paths(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request(1)])
    (tmp_path / "link").symlink_to(source)
    for files, message in (
        ((str(tmp_path / "no"), "out", None), "no such file"),
        ((str(tmp_path), "out", None), "no such file"),
        ((str(source), str(tmp_path / "link"), None), "is the input file"),
        ((str(source), str(tmp_path / "no" / "out"), None), "must be a folder"),
        ((str(source), str(tmp_path), None), "must be a folder"),
        ((str(source), "", None), "must be a folder"),
        ((str(source), "http://x/y", str(source)), "no such folder"),
    ):
        with pytest.raises(ValueError, match=message):
            BatchFiles(*files)


@pytest.mark.slow
def test_a_pipe(runs: Runs, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, "\n".join([request(1), request(2)]).encode())
    os.close(writer)
    assert runs.run(f"/dev/fd/{reader}", tmp_path / "out") == 0
    os.close(reader)
    assert ids(tmp_path / "out") == ["r1", "r2"]


def test_a_pipe_that_cannot_be_copied_is_named(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", fill)
    with pytest.raises(OSError, match=r"--input-file /dev/null: cannot be copied .No space left on device."):
        runs.run("/dev/null", tmp_path / "out")


class Site(http.server.BaseHTTPRequestHandler):
    """Has an input at /in and takes an output at /out. `refusals`: PUTs that are refused before."""

    put: bytes
    refusals = 0

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/in" else 404)
        self.end_headers()
        self.wfile.write("\n".join([request(1), request(2)]).encode())

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if Site.refusals:
            Site.refusals -= 1
            self.send_error(500)
            return
        Site.put = body
        self.send_response(201)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("with_folder", [False, True])
def test_urls(runs: Runs, tmp_path: Path, site: str, with_folder: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_file, "_UPLOAD_PAUSE_SECONDS", 0)
    folder = tmp_path if with_folder else None
    Site.refusals = 1
    assert runs.run(f"{site}/in", f"{site}/out", folder) == 0
    assert [json.loads(line)["custom_id"] for line in Site.put.splitlines()] == ["r1", "r2"]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match=r"cannot be fetched.*404"):
        runs.run(f"{site}/no", tmp_path / "out")


@pytest.mark.slow
def test_answers_that_cannot_be_uploaded_stay(
    runs: Runs, tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_file, "_UPLOAD_PAUSE_SECONDS", 0)
    source = write(tmp_path / "in", [request(1)])
    (tmp_path / "folder").mkdir()
    Site.refusals = 5
    with pytest.raises(OSError, match="cannot be uploaded"):
        runs.run(source, f"{site}/out", tmp_path / "folder")
    assert runs.run(source, f"{site}/out", tmp_path / "folder") == 0
    assert runs.engine.requests == [], "they were there"
    assert json.loads(Site.put)["custom_id"] == "r1"
    assert list((tmp_path / "folder").iterdir()) == []


def test_metrics_are_served_meanwhile(runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write(tmp_path / "in", [request(1)])
    scraped: list[str] = []

    def scrape_soon(engine: FakeEngine) -> None:
        engine.paused = True

        def scrape() -> None:
            wait_until(lambda: "metrics are at" in caplog.text, 60)
            found = re.search(r"metrics are at (\S+)", caplog.text)
            assert found is not None
            for url in (found[1], found[1].removesuffix("/metrics")):
                scraped.append(urllib.request.urlopen(url, timeout=5).read().decode())
            engine.resume()

        threading.Thread(target=scrape).start()

    runs.prepare = scrape_soon
    files = BatchFiles(str(source), str(tmp_path / "out"))
    with caplog.at_level(logging.INFO, "shardline"):
        config = ServerConfig(port=0)
        assert run_batch(EngineConfig(), config, files, serve_metrics=True, start_llm=runs.start_llm) == 0
    assert ["shardline:num_requests_running" in text for text in scraped] == [True, True]
