"""A tokenizer whose code fails or panics: its errors are answers, and the server goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers

from shardline.config.server import ServerConfig
from shardline.text.tokenizer import Tokenizer
from tests.server.conftest import serve
from tests.text.builders import byte_level_json

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def panicking() -> tokenizers.Tokenizer:
    """Its pre-tokenizer cuts texts into pieces of no characters."""
    source = json.loads(byte_level_json())
    source["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    return tokenizers.Tokenizer.from_str(json.dumps(source))


def failing() -> tokenizers.Tokenizer:
    """It knows one word, and has no token for others."""
    model = tokenizers.models.WordLevel({"one": 0}, unk_token="<unk>")
    return tokenizers.Tokenizer(model)


@pytest.mark.parametrize("backend", [panicking(), failing()], ids=["panic", "error"])
def test_a_text_on_which_the_tokenizer_fails_is_answered_400(backend: tokenizers.Tokenizer) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/completions", {"prompt": ["Hi", "Hi " * 2000]}),
        ("/v1/completions", {"prompt": [1], "bad_words": ["no"]}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/responses", {"input": "Hi"}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/tokenize", {"prompt": "Hi " * 5000}),
        ("/tokenize", CHAT),
    ]
    with serve(ServerConfig()) as running, running.http() as http:
        own = running.service.require_tokenizer()
        own.backend, good = backend, own.backend
        for path, body in requests:
            answer: httpx.Response = http.post(path, json=body)
            assert answer.status_code == 400, (path, answer.text)
            assert "the tokenizer failed" in answer.json()["error"]["message"]
        own.backend = good
        assert http.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200


def test_special_tokens_are_looked_at_with_a_tokenizer_that_fails() -> None:
    backend = panicking()
    backend.add_special_tokens(["<x>"])
    assert Tokenizer(backend, special_tokens={"eos_token": "<x>"}).spelled.find_ambiguous() == []


def test_files_that_make_the_library_fail_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": 3}}')
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
