"""`shardline watermark`: keys that are made, marks that are found, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from shardline import LLM, SamplingParams
from shardline.cli.main import main
from shardline.watermark import SCHEMES
from shardline.watermark.keys import KGWKey, SynthIDKey, WatermarkKey, write_key

KEYS: dict[str, WatermarkKey] = {
    "kgw": KGWKey(hashing_key=15485863),
    "synthid": SynthIDKey(keys=tuple(range(1000, 31000, 1000))),
}


def detect(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["watermark", "detect", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.usefixtures("forked_engines")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_marked_answer_of_the_demo_model_is_found(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, text = tmp_path / "key.json", tmp_path / "text"
    write_key(KEYS[scheme], key)
    with LLM("demo", watermark_config={"scheme": scheme, "key_file": str(key)}, max_model_len=512) as llm:
        params = SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True, seed=1)
        asked = [params, *(SamplingParams.clone(params) for _ in range(2))]
        asked[1].watermarking, asked[2].watermarking = True, False
        marked, again, plain = (output.outputs[0] for output in llm.generate(["Tell me about the sea."] * 3, asked))
    assert again.token_ids == marked.token_ids != plain.token_ids
    text.write_text(json.dumps(list(marked.token_ids)))
    found = detect(capsys, str(text), "--key-file", str(key), "--token-ids")
    assert found["scheme"] == scheme
    assert found["num_tokens"] == 200
    assert found["p_value"] < 1e-6
    text.write_text(json.dumps(list(plain.token_ids)))
    assert detect(capsys, str(text), "--key-file", str(key), "--token-ids")["p_value"] > 1e-3
    monkeypatch.setattr("sys.stdin", io.StringIO(marked.text))
    assert main(["watermark", "detect", "-", "--key-file", str(key)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["scheme"] == scheme
    assert float(lines["p"]) < 1e-5
    assert float(lines["z"]) > 4
    assert lines["tokens"].startswith("by the tokenizer of demo (the default: --model names")
    assert (found["model"], found["tokenizer"]) == ("demo", None)


def test_a_key_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = str(tmp_path / "key.json")
    assert main(["watermark", "key", key, "--scheme", "synthid"]) == 0
    assert "keep it secret" in capsys.readouterr().out
    assert main(["watermark", "key", key]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"shardline: error: there is a file {key} already, ")
    assert error.endswith("give another name, or move the file away\n")


@pytest.mark.parametrize(
    ("key", "content", "words", "message"),
    [
        ('{"keys": []}', b"Hello", (), "keys must have 1 to 64 numbers, got 0"),
        ('{"hashing_key": 5}', b"", (), "the text is too short: it has 0 tokens, and 2 are needed at least"),
        ('{"hashing_key": 5}', b"\xff", (), "it is no text in UTF-8"),
        ('{"hashing_key": 5}', b'["5"]', ("--token-ids",), "must be a JSON list of whole numbers"),
        ('{"hashing_key": 5}', b"[1, 1000000]", ("--token-ids",), "outside of the vocabulary"),
        ('{"hashing_key": 5}', b"[" * 100_000, ("--token-ids",), "must be a JSON list of whole numbers"),
        ('{"hashing_key": 5}', b"Hello", ("--tokenizer", "FOLDER"), "FOLDER has no tokenizer: give one with"),
        ('{"hashing_key": 5}', b"Hello", ("--model", ""), "there is no such folder"),
        ('{"hashing_key": 5}', None, (), "No such file or directory"),
    ],
)
def test_bad_input_is_one_line(
    key: str,
    content: bytes | None,
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "key.json").write_text(key)
    (tmp_path / "empty").mkdir()
    words = tuple(word.replace("FOLDER", str(tmp_path / "empty")) for word in words)
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    assert main(["watermark", "detect", str(tmp_path / "text"), "--key-file", str(tmp_path / "key.json"), *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message.replace("FOLDER", str(tmp_path / "empty")) in line
