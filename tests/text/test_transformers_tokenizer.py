"""The tokenizer that users of Hugging Face's tokenizers know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shardline.text.chat_template import ChatTemplate
from shardline.text.transformers_tokenizer import TransformersTokenizer
from tests.text import builders

CHAT = [{"role": "user", "content": "the <|end|> dog"}]


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[TransformersTokenizer]:
    own = builders.tokenizer(builders.byte_level_json())
    template = ChatTemplate(builders.TEMPLATE, own.special_tokens)
    yield TransformersTokenizer(own, template, 64)
    template.close()


def test_texts_and_ids(tokenizer: TransformersTokenizer) -> None:
    ids = tokenizer.encode("the dog")
    assert tokenizer("the dog") == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    assert tokenizer.decode(ids) == "the dog"
    assert tokenizer.batch_decode([ids, ids[:1]])[0] == "the dog"
    assert tokenizer.convert_tokens_to_string(tokenizer.tokenize("the dog")) == "the dog"
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize("the dog")) == ids
    assert tokenizer.convert_ids_to_tokens(ids[0]) == tokenizer.tokenize("the dog")[0]
    assert tokenizer.decode([1, *ids], skip_special_tokens=True) == "the dog"
    assert tokenizer.decode([1, *ids]) == "<|eos|>the dog"


def test_what_is_no_text_is_named(tokenizer: TransformersTokenizer) -> None:
    wrong: Any
    for wrong, name in ((5, "int"), (None, "NoneType"), ([5], "list"), (b"the dog", "bytes")):
        for encode in (tokenizer.encode, tokenizer.tokenize, tokenizer):
            with pytest.raises(ValueError, match=rf"a tokenizer encodes text \(str\), got ({name}|int)$"):
                encode(wrong)


def test_vocabulary_and_named_tokens(tokenizer: TransformersTokenizer) -> None:
    vocab = tokenizer.get_vocab()
    assert len(tokenizer) == len(vocab) == tokenizer.max_token_id + 1
    assert tokenizer.get_added_vocab() == {token: vocab[token] for token in builders.SPECIAL}
    assert tokenizer.vocab_size == len(vocab) - len(builders.SPECIAL)
    assert (tokenizer.bos_token, tokenizer.eos_token_id) == ("<|bos|>", vocab["<|eos|>"])
    assert tokenizer.unk_token_id is None
    assert set(tokenizer.all_special_tokens) == set(builders.SPECIAL)
    with pytest.raises(AttributeError, match="no attribute 'sop_token'"):
        _ = tokenizer.sop_token


def test_several_texts_are_padded_and_cut(tokenizer: TransformersTokenizer) -> None:
    with pytest.raises(ValueError, match="no"):
        tokenizer(["a", "the dog"], padding=True)
    long, short = tokenizer(["the dog", "a"], truncation=True, max_length=2).input_ids
    assert (len(long), len(short)) == (2, 1)
    with pytest.raises(ValueError, match="make tensors"):
        tokenizer("a", return_tensors="pt")  # type: ignore[arg-type]


def test_chats(tokenizer: TransformersTokenizer) -> None:
    text = "<|bos|><|user|>the <|end|> dog<|end|>\n"
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == text
    encoded = tokenizer.apply_chat_template(CHAT)
    assert encoded["input_ids"] == encoded.input_ids == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.apply_chat_template([CHAT, CHAT], return_dict=False) == [encoded.input_ids] * 2
    assert tokenizer.apply_chat_template(CHAT, chat_template="{{ word }}", word="cat", tokenize=False) == "cat"
    assert tokenizer.chat_template == builders.TEMPLATE
