"""Tokenizers loaded from a folder, compared with transformers."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
import tokenizers
from tokenizers import processors

from shardline.text.model_files import read_eos_token_ids
from shardline.text.tokenizer import MAX_INLINE_CHARS, Tokenizer
from tests.text import builders

TEXTS = ["What does it do?", " leading", "", "Grüße 🙂\n\n你好", "<|user|>hi<|end|>"]


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def with_bos_processor(source: str) -> str:
    backend = tokenizers.Tokenizer.from_str(source)
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", backend.token_to_id("<|bos|>"))]
    )
    return backend.to_str()


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("in_processor", [True, False])
@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_ids_and_text_as_in_transformers(tmp_path: Path, kind: str, in_processor: bool, add_bos: bool | None) -> None:
    from transformers import AutoTokenizer

    source = builders.byte_level_json() if kind == "byte-level" else builders.metaspace_json()
    config = {} if add_bos is None else {"add_bos_token": add_bos}
    folder = builders.save_folder(tmp_path, with_bos_processor(source) if in_processor else source, **config)
    oracle = AutoTokenizer.from_pretrained(folder)
    tokenizer = load(folder)
    assert tokenizer.bos_token_id == oracle.bos_token_id
    for text in TEXTS:
        for special in (True, False):
            ids = tokenizer.encode_text(text, add_special_tokens=special)
            assert ids == oracle.encode(text, add_special_tokens=special), (text, special)
            for skip in (True, False):
                assert tokenizer.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)
        assert tokenizer.encode_texts([text]) == [tokenizer.encode_text(text)]


@pytest.mark.parametrize(("num_chars", "on_loop"), [(MAX_INLINE_CHARS, True), (MAX_INLINE_CHARS + 1, False)])
def test_long_texts_are_encoded_on_a_thread(num_chars: int, on_loop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = builders.tokenizer(builders.byte_level_json())
    encode_text, threads = tokenizer.encode_text, []

    def noting_encode(text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread())
        return encode_text(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_text", noting_encode)
    text = "x" * num_chars
    assert asyncio.run(tokenizer.encode_text_async(text, False)) == encode_text(text, False)
    assert [thread is threading.main_thread() for thread in threads] == [on_loop]


@pytest.mark.parametrize("num_chars", [1, MAX_INLINE_CHARS + 1])
def test_half_of_a_surrogate_pair_is_named(num_chars: int) -> None:
    """As a text that is read with the error handler `surrogateescape` has them."""
    tokenizer = builders.tokenizer(builders.byte_level_json())
    with pytest.raises(ValueError, match=rf"character {num_chars + 1} of the text, '\\udce9', is half of a surr"):
        tokenizer.encode_text("x" * num_chars + "\udce9")


def test_eos_may_be_several(tmp_path: Path) -> None:
    folder = builders.save_folder(tmp_path, builders.byte_level_json())
    tokenizer = load(folder)
    eos, end = tokenizer.token_id("<|eos|>"), tokenizer.token_id("<|end|>")
    assert tokenizer.eos_token_ids == (eos,)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": end}))
    assert load(folder).eos_token_ids == (end, eos)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, end]}))
    assert load(folder).eos_token_ids == (eos, end)
    assert read_eos_token_ids(folder) == (eos, end)


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    folder = builders.save_folder(
        tmp_path, builders.byte_level_json(), eos_token={"content": "<|end|>"}, bos_token=None
    )
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|user|>"}}))
    tokenizer = load(folder)
    assert tokenizer.special_tokens == {"bos_token": "<|user|>", "eos_token": "<|end|>"}
    assert tokenizer.eos_token_ids == (tokenizer.token_id("<|end|>"),)
    assert tokenizer.token_id("<|end|>") in tokenizer.special_token_ids


def test_saved_truncation_and_padding_are_off(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(builders.byte_level_json())
    backend.enable_truncation(4)
    backend.enable_padding(length=300)
    tokenizer = load(builders.save_folder(tmp_path, backend.to_str()))
    ids = tokenizer.encode_text("the quick brown fox " * 20)
    assert 20 < len(ids) < 300
    assert tokenizer.decode(ids) == "the quick brown fox " * 20


def test_no_tokenizer_is_none(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None


def test_broken_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"tokenizer\.model but no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    builders.save_folder(tmp_path, builders.byte_level_json())
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is corrupt: it must hold an object, not list"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is corrupt: "):
        Tokenizer.from_folder(tmp_path)


def test_vocabulary(tmp_path: Path) -> None:
    tokenizer = builders.tokenizer(builders.byte_level_json())
    size = tokenizer.vocab_size
    assert tokenizer.token(size) is None
    assert tokenizer.token(size - 1) is not None
    assert tokenizer.token_id("no such token") is None
    assert tokenizer.decode([size, size + 7]) == ""
