"""Two real servers over fake engines, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardline.cli.main import main
from shardline.compare import Endpoint, answers, compare
from shardline.compare.answers import Options
from shardline.config.server import ServerConfig
from tests.benchmark.stub_server import HEAD, LAST, Script, event, stub_server, whole
from tests.server.conftest import serve

URL = "http://127.0.0.1:9"


@pytest.mark.slow
def test_two_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('Hi\n\n{"prompt": "Hi there"}\n')
    with serve() as a, serve() as b:
        command = ["compare", a.url, f"{b.url}/v1", "--prompts", str(prompts), "--max-tokens", "5"]
        assert main([*command, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["num_prompts"], found["num_equal"], found["num_same_bits"]) == (2, 2, 2)
        assert found["prompts"][0]["texts"][0] == found["prompts"][0]["texts"][1] != ""
        assert found["speed"]["TTFT (ms)"]["ratio"]["low"] > 0
        assert 0 < found["speed"]["tokens/s"]["a"]["low"] < 5e3 / found["speed"]["TTFT (ms)"]["a"]["low"]
        b.engine.reply = "Something else."
        page, dataset = tmp_path / "page.html", tmp_path / "conversations.json"
        turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
        dataset.write_text(json.dumps([{"id": "1"}, {"id": "2", "conversations": turns}]))
        assert main(["compare", a.url, b.url, "--dataset", str(dataset), "--json"]) == 1
        assert [one["prompt"] for one in json.loads(capsys.readouterr().out)["prompts"]] == ["Hi"]
        assert main([*command, "--chat", "--html", str(page)]) == 1
        shown = capsys.readouterr().out
        assert "0 of 2 answers are equal" in shown
        assert "differs at token 1 after ''" in shown
        assert "<span style='background:#fde68a'>S</span>" in page.read_text()
        assert "another model" in page.read_text()


def test_an_endpoint_that_refuses_is_an_error_of_the_prompt() -> None:
    with serve() as a:
        found = compare(Endpoint(a.url), Endpoint(a.url), ["Hi"], Options(temperature=-1.0))
        assert not found.equal
        assert "HTTP 400" in found.pairs[0].error
        assert "temperature" in found.pairs[0].error
        with pytest.raises(RuntimeError, match="cannot connect"):
            compare(Endpoint(a.url), Endpoint(URL), ["Hi"])


def test_an_endpoint_that_wants_a_key_is_told_from_one_without_models() -> None:
    named = pytest.raises(RuntimeError, match="answers 401 and names no model: give its key")
    with serve(ServerConfig(port=0, api_key=("secret",))) as a, named:
        compare(Endpoint(a.url), Endpoint(a.url), ["Hi"])


def _answering(text: str, *, silent_after: int = 99) -> Callable[[int, str, Any], Script]:
    """Answers with `text`, and is silent from some request on; the first is for the list of models."""

    def answer(index: int, path: str, body: Any) -> Script:
        if index >= silent_after:
            return [(60.0, b"")]
        if path == "/v1/models":
            return [(0.0, whole({"data": [{"id": "m"}]}))]
        piece = event({"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]})
        return [(0.0, HEAD + piece + LAST)]

    return answer


def test_a_silent_endpoint_is_named_and_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in (("_NOTICE_SECONDS", 0.2), ("_LIST_SECONDS", 0.6), ("_SILENCE_SECONDS", 0.6)):
        monkeypatch.setattr(answers, name, seconds)
    with stub_server(_answering("Hi")) as a, stub_server(_answering("Hi", silent_after=2)) as b:
        assert main(["compare", a.url, b.url]) == 2  # equal as far as answers have come
        told = capsys.readouterr()
        assert told.err.count(f"waiting for {b.url}, which has been silent for") == 1
        assert "1 of 8 answers are equal" in told.out
        assert "B: no answer: nothing came for" in told.out
        assert told.out.count("B: not asked: it has not answered an earlier prompt") == 6
    with stub_server(_answering("Hi")) as a, stub_server(_answering("No", silent_after=2)) as b:
        assert main(["compare", a.url, b.url, "--num-prompts", "2"]) == 1  # one differs for certain
    with stub_server(_answering("Hi")) as a, stub_server(_answering("Hi", silent_after=0)) as b:
        assert main(["compare", a.url, b.url]) == 2
        assert f"error: {b.url}/v1/models has not answered within" in capsys.readouterr().err


def test_what_could_not_be_compared_has_an_exit_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", URL, URL]) == 2
    assert "cannot connect" in capsys.readouterr().err
    with stub_server(_answering("Hi")) as a:
        assert main(["compare", a.url, a.url, "--html", str(tmp_path)]) == 2
        told = capsys.readouterr()
        assert f"--html {tmp_path} cannot be written: Is a directory" in told.err
        assert "8 of 8 answers are equal" in told.out, "it is not lost"


def test_a_prompt_that_no_request_can_have_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts").write_text('Hi\n{"prompt": "\\ud83d\\ude00"}\n{"prompt": "\\ud83d"}\n')
    assert main(["compare", URL, URL, "--prompts", str(tmp_path / "prompts")]) == 2
    assert "prompts, line 3: the prompt has half a surrogate pair" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-url", URL], "must look like http"),
        ([f"{URL}9999", URL], "the server's URL 'http://127.0.0.1:99999' is none: Port out of range 0-65535"),
        ([URL, URL, "--header", "A=x", "B=\u20ac"], "a header must be one line in Latin-1; 'B' is not"),
        ([URL, URL, "--prompts", "missing.txt"], "cannot read missing.txt"),
        ([URL, URL, "--dataset", "missing.json"], "cannot read missing.json"),
        ([URL, URL, "--max-tokens", "0"], "--max-tokens must be 1 or more"),
        ([URL, URL, "--num-prompts", "0"], "--num-prompts must be 1 or more"),
        ([URL, URL, "--extra-body", "[]"], "takes a JSON object"),
        ([URL, URL, "--extra-body", '{"stream": false}'], "extra_body must not set stream to False"),
        ([URL, URL, "--extra-body", '{"n": 2}'], "extra_body must not set n to 2"),
        ([URL, URL, "--temperature", "nan"], "--temperature must be a number, got nan"),
        ([URL, URL, "--html", "no-folder/page.html"], "its folder does not exist"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *words]) == 2
    assert message in capsys.readouterr().err


def test_what_is_no_json_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", URL, URL, "--extra-body", "{'n': 1}"])
    assert """argument --extra-body: "{'n': 1}" is not JSON: Expecting property name""" in capsys.readouterr().err
