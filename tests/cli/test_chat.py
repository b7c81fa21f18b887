"""The terminal chat: with an engine, with a server, and the user's commands."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from shardline.api.async_llm import AsyncLLM
from shardline.cli.chat_backends import ChatBackend, LocalBackend, RemoteBackend
from shardline.cli.commands.chat import Messages, talk
from shardline.cli.main import main
from shardline.config.engine import EngineConfig
from shardline.sampling_params import SamplingParams
from tests.api.fake_engine import FakeCluster, load_text, scripted


class Echo:
    """Repeats what the user said; some messages make it fail or simulate ctrl-C."""

    model = "echo"

    def __init__(self) -> None:
        self.heard: list[Messages] = []

    def reply(self, messages: Messages) -> Iterator[str]:
        self.heard.append([dict(message) for message in messages])
        text = messages[-1]["content"]
        if text == "bad":
            raise ValueError("too long")
        yield "you said "
        if text == "stop":
            raise KeyboardInterrupt
        yield text

    def close(self) -> None:
        pass


def typed(backend: ChatBackend, *lines: str, system: str = "") -> str:
    out = io.StringIO()
    words = iter([*lines, None])
    start: Messages = [{"role": "system", "content": system}] if system else []
    talk(backend, Console(file=out, width=80), start, lambda: next(words))
    return out.getvalue()


def test_a_conversation_grows_and_is_forgotten() -> None:
    echo = Echo()
    out = typed(echo, "one", "", "[two]", "/reset", "three", "/exit", "four", system="be brief")
    assert out == "you said one\nyou said [two]\nyou said three\n"
    assert [[m["role"] for m in heard] for heard in echo.heard] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert echo.heard[1][2]["content"] == "you said one"


def test_a_refused_or_stopped_answer_does_not_end_the_chat() -> None:
    echo = Echo()
    out = typed(echo, "bad", "stop", "go on")
    assert "too long" in out
    assert "you said  [stopped]" in out
    assert [message["content"] for message in echo.heard[-1]] == ["stop", "you said ", "go on"]


def local(cluster: FakeCluster, config: EngineConfig) -> LocalBackend:
    llm = AsyncLLM(config, connect=cluster, load_text=load_text)
    return LocalBackend(config, SamplingParams(max_tokens=None, temperature=0.0), llm)


def test_a_local_model_streams_and_aborts() -> None:
    tokenizer = load_text(EngineConfig()).tokenizer
    assert tokenizer is not None
    cluster = FakeCluster(next_token=scripted(tokenizer.encode_text("one two three four")))
    backend = local(cluster, EngineConfig.from_options(on_failure="exit"))
    messages = [{"role": "user", "content": "hi"}]
    assert "".join(backend.reply(messages)) == "one two three four"
    assert tokenizer.decode(cluster.clients[0].added[0].prompt_token_ids, False).startswith("<|bos|><|user|>hi")
    pieces = backend.reply(messages)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert len(cluster.clients[0].aborted) == 1
    with pytest.raises(ValueError, match="maximum context length"):
        next(backend.reply([{"role": "user", "content": "dog " * 100}]))
    cluster.clients[0].die("rank 0 was killed")
    with pytest.raises(RuntimeError, match="rank 0 was killed"):
        next(backend.reply(messages))
    backend.close()
    backend.close()
    assert cluster.clients[0].closed


def test_an_engine_that_dies_during_an_answer_says_why() -> None:
    cluster = FakeCluster()
    backend = local(cluster, EngineConfig.from_options(on_failure="exit"))
    cluster.clients[0].paused.set()
    death = threading.Timer(0.1, cluster.clients[0].die, ["rank 1 was killed"])
    death.start()
    with pytest.raises(RuntimeError, match="rank 1 was killed"):
        list(backend.reply([{"role": "user", "content": "hi"}]))
    death.join()
    backend.close()


class Server(BaseHTTPRequestHandler):
    """The part of the OpenAI API that the chat needs."""

    bodies: list[Any] = []  # noqa: RUF012  one server at a time

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append((self.headers["Authorization"], body))
        said = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        if said == "bad":
            self._answer(400, {"error": {"message": "too long"}})
            return
        self.send_response(200)
        self.end_headers()
        for text in () if said == "think" else ("hel", "lo"):
            event = {"choices": [{"delta": {"content": text}} if "messages" in body else {"text": text}]}
            self.wfile.write(b": comment\n\ndata: " + json.dumps(event).encode() + b"\n\n")
        if said == "think":
            for delta in ({"reasoning": "well"}, {"reasoning_content": ", so"}, {"content": "four"}, {"content": "."}):
                self.wfile.write(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n")
        ending = b'data: {"error": {"message": "engine died"}}\n\n' if said == "die" else b""
        self.wfile.write(ending + b'data: {"choices": []}\n\ndata: [DONE]\n\n')

    def _answer(self, code: int, body: Any) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Server.bodies = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_is_asked_in_its_own_words(url: str) -> None:
    backend = RemoteBackend(url + "/v1/", api_key="key", temperature=0.5, max_tokens=None)
    assert backend.model == "served"
    messages = [{"role": "user", "content": "hi"}]
    assert list(backend.reply(messages)) == ["hel", "lo", ""]
    assert Server.bodies == [
        ("Bearer key", {"model": "served", "messages": messages, "stream": True, "temperature": 0.5})
    ]
    with pytest.raises(ValueError, match="answered 400: too long"):
        list(backend.reply([{"role": "user", "content": "bad"}]))
    with pytest.raises(RuntimeError, match="engine died"):
        list(backend.reply([{"role": "user", "content": "die"}]))


def test_the_command(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    monkeypatch.setenv("OPENAI_API_KEY", "one of OpenAI's")
    assert main(["chat", "--url", url, "--system-prompt", "be brief"]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert Server.bodies[0][0] == "Bearer one of OpenAI's"
    assert Server.bodies[0][1]["messages"][0] == {"role": "system", "content": "be brief"}


def test_reasoning_is_shown_and_forgotten(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("think\nhi\n"))
    assert main(["chat", "--url", url]) == 0
    assert capsys.readouterr().out == "<think>\nwell, so\n</think>\nfour.\nhello\n"
    assert Server.bodies[-1][1]["messages"][1] == {"role": "assistant", "content": "four."}


def test_one_message_is_answered_and_the_command_ends(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", url, "--model-name", "other", "-q", "hi", "--stats"]) == 0
    assert re.fullmatch(r"hello\n\d\.\d s\n", capsys.readouterr().out)
    assert Server.bodies[0][1]["model"] == "other"


def test_texts_are_continued(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "--url", url, "--max-tokens", "3", "--quick", "hi"]) == 0
    assert Server.bodies[0][1] == {"model": "served", "prompt": "hi", "stream": True, "max_tokens": 3}
    monkeypatch.setattr("sys.stdin", io.StringIO("one\nbad\n"))
    assert main(["complete", "--url", url]) == 0
    assert capsys.readouterr().out == "hello\nhello\n\nthe server answered 400: too long\n"


def test_no_server_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    for url, reason in (("http://127.0.0.1:9", "Connection refused"), ("http://no.such.host.invalid", r"\w[^<>\n]*")):
        assert main(["chat", "--url", url]) == 1
        message = rf"shardline: error: {re.escape(url)}/v1 cannot be reached: {reason}\n"
        assert re.fullmatch(message, capsys.readouterr().err)
