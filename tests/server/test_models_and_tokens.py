from __future__ import annotations

import httpx
import openai
import pytest

from shardline.config.server import ServerConfig
from shardline.messages.request import TokenLogprobs
from shardline.server.openai.answer_parts import TokenPieces, chat_logprobs
from shardline.server.openai.completions.writer import CompletionLogprobsWriter
from tests.server.conftest import serve
from tests.server.fake_engine import MAX_MODEL_LEN
from tests.text.builders import byte_fallback_json, byte_level_json, metaspace_json, tokenizer

TOKENIZER = tokenizer(byte_level_json())


def test_models_are_listed(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    model = http.get("/v1/models/demo").json()
    assert model["object"] == "model"
    assert model["max_model_len"] == MAX_MODEL_LEN
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-5")


def test_every_served_name_is_taken_and_the_first_one_answers() -> None:
    with serve(ServerConfig(served_model_name=("org/big", "small"))) as running, running.openai() as client:
        assert [model.id for model in client.models.list()] == ["org/big", "small"]
        assert client.models.retrieve("org/big").id == "org/big"
        assert client.completions.create(model="small", prompt="a", max_tokens=1).model == "org/big"
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model="demo", prompt="a")
        assert caught.value.code == "model_not_found"
        assert "`org/big`, `small`" in caught.value.message


def test_tokenize_and_detokenize(http: httpx.Client) -> None:
    text = "Grüße 🙂"
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    ids = TOKENIZER.encode_text(text)
    assert answer["tokens"] == ids
    assert answer["count"] == len(ids)
    assert answer["max_model_len"] == MAX_MODEL_LEN
    assert answer["token_strs"] == [TOKENIZER.token(token_id) for token_id in ids]
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}


def test_tokenize_a_conversation(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False}
    ids = http.post("/tokenize", json=body).json()["tokens"]
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<|bos|><|user|>Hi<|end|>\n"


def test_a_special_token_stays_text_in_a_chat_and_is_a_token_in_a_raw_prompt() -> None:
    chat = {"messages": [{"role": "user", "content": "a <|eos|> b"}]}
    eos = TOKENIZER.token_id("<|eos|>")
    with serve(ServerConfig()) as running, running.http() as http:
        ids = http.post("/tokenize", json=chat).json()["tokens"]
        assert eos not in ids
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<|bos|><|user|>a <|eos|> b<|end|>\n<|assistant|>"
        assert eos in http.post("/tokenize", json={"prompt": "a <|eos|> b"}).json()["tokens"]
        usage = http.post("/v1/chat/completions", json={**chat, "max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens"] == len(ids), "the chat endpoint takes the same way"
    with serve(ServerConfig(special_tokens_in_content=True)) as running, running.http() as http:
        assert eos in http.post("/tokenize", json=chat).json()["tokens"]


def test_tokenize_long_text(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": "ab " * 5000}).json()["count"] >= 5000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [2**40]}),
    ],
)
def test_bad_token_requests(http: httpx.Client, path: str, body: dict[str, object]) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("source", [byte_level_json(), metaspace_json(), byte_fallback_json()])
def test_token_bytes_join_to_the_text(source: str) -> None:
    one = tokenizer(source)
    text = "the quick 🙂 brown" if source != metaspace_json() else "the quick brown"
    ids = one.encode_text(text, add_special_tokens=False)
    joined = b"".join(one.token_bytes(token_id) for token_id in ids).decode()
    assert joined.removeprefix(" ") == text


def test_half_a_character_is_written_as_bytes_and_offsets_count_characters() -> None:
    one = tokenizer(byte_fallback_json())
    ids = one.encode_text("a🙂b", add_special_tokens=False)
    logprobs = [TokenLogprobs(-1.0, 1, [token_id], [-1.0]) for token_id in ids]
    pieces = TokenPieces(one)
    written = CompletionLogprobsWriter(pieces, offset=10).write(ids, logprobs)
    assert "bytes:\\xf0" in written.tokens
    assert written.text_offset[0] == 10
    smile = written.tokens.index("bytes:\\xf0")
    assert len(set(written.text_offset[smile : smile + 4])) == 1
    assert written.text_offset[smile + 4] == written.text_offset[smile] + 1
    content = chat_logprobs(pieces, ids, logprobs).content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == " a🙂b"


def test_without_a_tokenizer_tokens_are_named_by_id() -> None:
    assert TokenPieces(None)[7].text == "token_id:7"
