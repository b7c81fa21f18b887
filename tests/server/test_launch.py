"""A server process, from its start to its end."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from shardline.server.launch import bind_listener, reach_notice, run_server
from tests.server.fake_engine import REPLY

pytestmark = pytest.mark.slow  # nearly all start a server process
STREAM = {"prompt": "Hi", "max_tokens": 500, "stream": True}


class Process:
    """A server process and its output."""

    def __init__(self, **options: Any) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.server.serve_fake", json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def url(self) -> str:
        """Wait until the server is ready; returns its URL."""
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            found = re.search(r"startup complete in .* serving demo at (\S+)$", line)
            if found:
                return found.group(1)
        raise AssertionError(self.popen.communicate())

    def end(self, timeout: float = 10.0) -> tuple[int, str, str]:
        """Wait for the process to end; returns its exit code, the rest of its stdout, and its stderr."""
        out, err = self.popen.communicate(timeout=timeout)
        return self.popen.returncode, out, err


@contextlib.contextmanager
def process(**options: Any) -> Iterator[Process]:
    one = Process(**options)
    try:
        yield one
    finally:
        if one.popen.poll() is None:
            one.popen.kill()
            one.popen.communicate()
        for pipe in (one.popen.stdout, one.popen.stderr):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def sighup(disposition: signal.Handlers) -> Iterator[None]:
    """What processes that start now do about SIGHUP. nohup has a suite ignore it, and so its children."""
    before = signal.signal(signal.SIGHUP, disposition)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=10, trust_env=False, verify=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_streams_finish(number: signal.Signals) -> None:
    with sighup(signal.SIG_DFL), process(seconds_per_token=0.03) as server, client(server.url()) as http:
        with http.stream("POST", "/v1/completions", json=STREAM) as stream:
            events = stream.iter_lines()
            next(events)
            server.popen.send_signal(number)
            deadline = time.monotonic() + 5.0
            while http.get("/ready").json() != {"status": "draining"}:
                assert time.monotonic() < deadline, "the signal is not noticed"
                time.sleep(0.05)
            refused = http.post("/v1/completions", json={"prompt": "Hi"})
            assert refused.status_code == 503
            rest = [line for line in events if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"
        code, _, err = server.end()
        assert code == 0, err
        assert "1 running request" in err
        assert "Traceback" not in err


def test_new_requests_are_taken_during_the_shutdown_delay() -> None:
    with process(config={"shutdown_delay": 60.0}) as server, client(server.url()) as http:
        http.get("/ready").raise_for_status()
        server.popen.terminate()
        deadline = time.monotonic() + 5.0
        while (ready := http.get("/ready")).status_code == 200:
            assert time.monotonic() < deadline, "the signal is not noticed"
            time.sleep(0.05)
        assert (ready.status_code, ready.json()["status"]) == (503, "leaving")
        assert http.get("/health").status_code == http.get("/live").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200
        server.popen.terminate()
        assert server.end()[0] == 0


def test_streams_that_take_too_long_are_told() -> None:
    options = {"seconds_per_token": 0.05, "config": {"shutdown_timeout": 0.3}}
    with process(**options) as server, client(server.url()) as http:
        with http.stream("POST", "/v1/completions", json={**STREAM, "ignore_eos": True}) as stream:
            events = stream.iter_lines()
            next(events)
            server.popen.terminate()
            rest = [line for line in events if line]
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert error["code"] == "draining"
        assert "not finished in time" in error["message"]
        assert rest[-1] == "data: [DONE]"
        assert server.end()[0] == 0


def test_a_second_signal_ends_streams_at_once() -> None:
    with process(seconds_per_token=0.05) as server, client(server.url()) as http:
        with http.stream("POST", "/v1/completions", json={**STREAM, "ignore_eos": True}) as stream:
            events = stream.iter_lines()
            next(events)
            server.popen.send_signal(signal.SIGINT)
            time.sleep(0.2)
            server.popen.send_signal(signal.SIGINT)
            started = time.monotonic()
            rest = [line for line in events if line]
        assert "error" in rest[-2]
        assert server.end()[0] == 0
        assert time.monotonic() - started < 3


def test_death_of_the_engine_ends_the_process() -> None:
    with process(seconds_per_token=0.02, die_after_steps=5) as server, client(server.url()) as http:
        with http.stream("POST", "/v1/completions", json={**STREAM, "ignore_eos": True}) as stream:
            rest = [line for line in stream.iter_lines() if line]
        assert "rank 1 was killed" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        code, _, err = server.end()
        assert code == 1
        assert "rank 1 was killed" in err
        assert "Traceback" not in err


@pytest.mark.parametrize(("kind", "code"), [("ValueError", 2), ("RuntimeError", 1)])
def test_a_failed_start_ends_the_process(kind: str, code: int) -> None:
    with process(start_error=kind) as server:
        found, _, err = server.end()
        assert found == code
        assert "oh no" in err
        assert "Traceback" not in err


def test_serves_503_while_it_loads_and_can_be_stopped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with process(never_ready=True, config={"port": port}) as server, client(f"http://127.0.0.1:{port}") as http:
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(httpx.TransportError):
                if http.get("/health").status_code == 503:
                    break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.popen.terminate()
        code, _, err = server.end()
        assert code == 0
        assert "startup complete" not in err


def never(config: EngineConfig) -> Any:
    raise AssertionError("the engine was started")


def test_a_port_in_use_is_one_clear_error_before_anything_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port}: Address already in use; choose another --port"):
            run_server(EngineConfig(), ServerConfig(port=port), start_llm=never)


def test_a_file_without_a_key_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    with pytest.raises(ValueError, match="has no key; write one on each line"):
        run_server(EngineConfig(), ServerConfig(port=0, api_key_file=str(file)), start_llm=never)


@pytest.mark.parametrize("host", ["256.1.1.1", "203.0.113.1"])
def test_a_wrong_host_is_one_clear_error(host: str) -> None:
    with pytest.raises(ValueError, match=re.escape(host)):
        bind_listener(host, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_a_server_on_loopback_says_how_to_serve_others(host: str) -> None:
    with bind_listener(host, 0) as listener:
        level, text = reach_notice(listener, has_key=False) or pytest.fail("no notice")
    assert level == logging.INFO
    assert f"listening on {host} only" in text
    assert "--host 0.0.0.0" in text


def test_a_server_for_others_without_a_key_is_warned_of() -> None:
    with bind_listener("0.0.0.0", 0) as listener:
        level, text = reach_notice(listener, has_key=False) or pytest.fail("no notice")
        assert reach_notice(listener, has_key=True) is None
    assert level == logging.WARNING
    assert "listening on 0.0.0.0 without a key" in text
    assert "--api-key" in text


def test_a_wrong_certificate_is_one_clear_error(tmp_path: Path) -> None:
    for name in ("key", "cert"):
        (tmp_path / name).write_text("nonsense")
    config = ServerConfig(port=0, ssl_keyfile=str(tmp_path / "key"), ssl_certfile=str(tmp_path / "cert"))
    with pytest.raises(ValueError, match="--ssl-certfile"):
        run_server(EngineConfig(), config)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls(tmp_path: Path) -> None:
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )  # fmt: skip
    with process(config={"ssl_keyfile": key, "ssl_certfile": cert}) as server:
        url = server.url()
        assert url.startswith("https://")
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=cert), trust_env=False) as http:
            answer = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 99})
        assert answer.json()["choices"][0]["text"] == REPLY
        server.popen.terminate()
        assert server.end()[0] == 0


def test_sighup_is_ignored_under_nohup() -> None:
    with sighup(signal.SIG_IGN), process() as server, client(server.url()) as http:
        server.popen.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert http.get("/ready").status_code == 200


def test_sighup_reads_the_file_of_keys_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n")
    with process(config={"api_key_file": str(file)}) as server, client(server.url()) as http:

        def status_with(key: str) -> int:
            return http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code

        assert [status_with("first"), status_with("second")] == [200, 401]
        file.write_text("second\n")
        server.popen.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 5.0
        while status_with("second") != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert status_with("first") == 401
