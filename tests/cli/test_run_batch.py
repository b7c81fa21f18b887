"""`shardline run-batch` with the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardline.cli.main import build_parser, main
from shardline.config.server import ServerConfig

LINES = (
    {
        "custom_id": "chat",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    },
    {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}},
    {"custom_id": "item", "method": "POST", "url": "/v1/responses", "body": {"input": "a", "max_output_tokens": 2}},
    {"custom_id": "none", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}},
)


@pytest.mark.e2e
def test_a_file(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, LINES)))
    flags = ["--model", "demo", "--served-model-name", "m", "--enforce-eager", "--max-model-len", "256"]
    assert main(["run-batch", "-i", str(source), "-o", str(output), *flags]) == 0
    answers = {answer["custom_id"]: answer for answer in map(json.loads, output.read_text().splitlines())}
    assert list(answers) == [line["custom_id"] for line in LINES]
    assert answers["chat"]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert answers["text"]["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert answers["item"]["response"]["body"]["object"] == "response"
    assert "--runner pooling" in answers["none"]["error"]["message"]


def test_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run-batch", "-i", "in"])
    assert caught.value.code == 2
    assert main(["run-batch", "-i", str(tmp_path / "no"), "-o", str(tmp_path / "out")]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_flags_of_vllm(tmp_path: Path) -> None:
    words = "run-batch -i a -o b --output-tmp-dir c --url 0.0.0.0 --port 1 --enable-metrics --response-role assistant"
    words += " --shutdown-timeout 5"
    args = build_parser().parse_args([*words.split(), "--max-log-len", "5", "--enable-prompt-tokens-details"])
    assert (args.input_file, args.output_file, args.output_tmp_dir) == ("a", "b", "c")
    assert (args.host, args.port, args.enable_metrics) == ("0.0.0.0", 1, True)
    assert ServerConfig(host=args.host, port=args.port).port == 1
