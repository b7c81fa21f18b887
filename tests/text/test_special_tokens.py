"""Special tokens that a user spells in a conversation stay text; all else is as the tokenizer alone does it."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.text.chat_template import ChatTemplate, Conversation, render_and_encode
from shardline.text.spelled_tokens import Marks
from shardline.text.tokenizer import Tokenizer
from tests.text import builders

ALL_FIELDS = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}<|end|>{% endfor %}{{ extra }}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim | upper if shout else m['content'] | trim }}"
    "{{ m['name'] }}{{ m['name'] }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> Tokenizer:
    return builders.tokenizer(builders.byte_level_json())


def metaspace() -> Tokenizer:
    return builders.tokenizer(builders.metaspace_json())


def byte_fallback() -> Tokenizer:
    """Special tokens that take spaces, or are words; "<think>" is an added token, but not special."""
    backend = tokenizers.Tokenizer.from_str(builders.byte_fallback_json())
    backend.add_special_tokens(
        [
            *(tokenizers.AddedToken(name, rstrip=True) for name in builders.SPECIAL[:3]),
            *(tokenizers.AddedToken(name, lstrip=True) for name in builders.SPECIAL[3:]),
            tokenizers.AddedToken("word", single_word=True),
        ]
    )
    backend.add_tokens(["<think>"])
    return Tokenizer(backend, special_tokens={"bos_token": "<|bos|>", "eos_token": "<|eos|>"})


def lower_case() -> Tokenizer:
    """Special tokens are found in normalized text, so that <|EOS|> is one too."""
    backend = tokenizers.Tokenizer(tokenizers.Tokenizer.from_str(builders.byte_level_json()).model)
    backend.normalizer = tokenizers.normalizers.Lowercase()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([tokenizers.AddedToken(name, normalized=True) for name in builders.SPECIAL])
    return Tokenizer(backend, special_tokens={"bos_token": "<|bos|>", "eos_token": "<|eos|>"})


TOKENIZERS = {
    "byte-level": byte_level(),
    "metaspace": metaspace(),
    "byte-fallback": byte_fallback(),
    "lower-case": lower_case(),
}
FORMS = pytest.mark.parametrize("name", TOKENIZERS)
PIECES = [
    *builders.SPECIAL,
    "<s>",
    "</s>",
    "<think>",
    "word",
    "a word",
    "<|",
    "|>",
    "<|e",
    "os|>",
    "eos",
    "<|EOS|>",
    " ",
    "\n",
    "a",
    "🙂",
]
TEXT = st.text(st.characters(max_codepoint=0x2000, exclude_categories=["Cs"]), max_size=4)
HOSTILE = st.lists(st.one_of(st.sampled_from(PIECES), TEXT), max_size=6).map("".join)


def count_specials(tokenizer: Tokenizer, ids: list[int]) -> int:
    return sum(token_id in tokenizer.special_token_ids for token_id in ids)


def encode(tokenizer: Tokenizer, texts: list[str], **options: Any) -> tuple[str, list[int]]:
    content, name, key, value, extra = texts
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"k" + key: value})}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": content}, {"type": "text", "text": value}]},
        {"role": "assistant", "content": content, "name": name, "tool_calls": [call]},
        {"role": "tool", "content": value},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": extra, "parameters": {"k" + key: 1}}}]
    template = ChatTemplate(ALL_FIELDS, tokenizer.special_tokens)
    variables = {"extra": extra, **options.pop("variables", {})}
    in_content = options.pop("special_tokens_in_content", False)
    chat = Conversation(messages, tools, variables, **options)
    return render_and_encode(template, tokenizer, chat, special_tokens_in_content=in_content)


@functools.cache
def harmless_ids(name: str, shout: bool, add: bool) -> list[int]:
    """The ids of a chat that spells no special token."""
    return encode(TOKENIZERS[name], ["x"] * 5, variables={"shout": shout}, add_special_tokens=add)[1]


@FORMS
@given(texts=st.lists(HOSTILE, min_size=5, max_size=5), shout=st.booleans(), add=st.booleans())
@settings(deadline=None, max_examples=40)
def test_no_text_adds_a_special_token(name: str, texts: list[str], shout: bool, add: bool) -> None:
    tokenizer = TOKENIZERS[name]
    options: dict[str, Any] = {"variables": {"shout": shout}, "add_special_tokens": add}
    text, ids = encode(tokenizer, texts, **options)
    harmless = harmless_ids(name, shout, add)
    unknown = tokenizer.token_id("<unk>")
    counted = [[one for one in some if one != unknown] for some in (ids, harmless)]
    assert count_specials(tokenizer, counted[0]) == count_specials(tokenizer, counted[1])
    if not shout:
        assert text == encode(tokenizer, texts, special_tokens_in_content=True, **options)[0], "the text stays as it is"


@FORMS
@given(text=st.lists(st.one_of(st.sampled_from(PIECES), TEXT), max_size=12).map("".join), add=st.booleans())
@settings(deadline=None, max_examples=150)
def test_without_spelled_tokens_the_ids_are_the_tokenizers(name: str, text: str, add: bool) -> None:
    tokenizer = TOKENIZERS[name]
    text = text.lower() if name == "lower-case" else text  # other spellings are never the template's
    assert tokenizer.spelled.encode(Marks([]), text, add) == tokenizer.encode_text(text, add)


def test_a_spelled_token_is_encoded_as_its_characters() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    template = ChatTemplate(builders.TEMPLATE, tokenizer.special_tokens)
    chat = [{"role": "user", "content": "say <|eos|> now"}]
    text, ids = render_and_encode(template, tokenizer, Conversation(chat))
    eos = tokenizer.token_id("<|eos|>")
    assert eos not in ids
    assert text == tokenizer.decode(ids, skip_special_tokens=False)
    marks = [tokenizer.token_id(token) for token in ("<|bos|>", "<|user|>", "<|end|>", "<|assistant|>")]
    assert [token_id for token_id in ids if token_id in tokenizer.special_token_ids] == marks
    assert eos in render_and_encode(template, tokenizer, Conversation(chat), special_tokens_in_content=True)[1], (
        "vLLM's way"
    )


def test_an_answer_that_spells_a_token_can_be_continued() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    template = ChatTemplate(builders.TEMPLATE, tokenizer.special_tokens)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The token <|end|> "}]
    text, ids = render_and_encode(template, tokenizer, Conversation(chat, continue_final_message=True))
    assert text.endswith("<|assistant|>The token <|end|> ")
    assert ids.count(tokenizer.token_id("<|end|>") or 0) == 1


def test_texts_of_two_fields_do_not_join_to_a_token() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    template = ChatTemplate("{{ messages[0].content }}{{ messages[0].name }}", tokenizer.special_tokens)
    for size in range(1, len("<|eos|>")):
        chat = [{"role": "user", "content": "<|eos|>"[:size], "name": "<|eos|>"[size:]}]
        text, ids = render_and_encode(template, tokenizer, Conversation(chat))
        assert text == "<|eos|>"
        assert count_specials(tokenizer, ids) == 0


def test_escapes_of_json_and_urls() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    chat = [{"role": "user", "content": "<|eos|>"}]
    escaped = ChatTemplate("{{ messages | tojson(ensure_ascii=true) }}", tokenizer.special_tokens)
    text, ids = render_and_encode(escaped, tokenizer, Conversation(chat))
    assert "<|eos|>" in text
    assert count_specials(tokenizer, ids) == 0
    quoted = ChatTemplate("{{ messages[0].content | urlencode }}", tokenizer.special_tokens)
    with pytest.raises(ValueError, match=r"spell '<\|eos\|>', and the chat template does not show it as text"):
        render_and_encode(quoted, tokenizer, Conversation(chat))


@pytest.mark.slow
def test_private_characters_of_a_user_are_no_marks() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    template = ChatTemplate("{{ messages[0].content }}", tokenizer.special_tokens)
    taken = "".join(map(chr, range(0xF0000, 0xF7000)))
    for _ in range(8):
        text, _ = render_and_encode(template, tokenizer, Conversation([{"role": "user", "content": taken + "<|eos|>"}]))
        assert text == taken + "<|eos|>"
    taken = "".join(map(chr, range(0xF0000, 0xFF000)))
    with pytest.raises(ValueError, match="too many private-use characters"):
        render_and_encode(template, tokenizer, Conversation([{"role": "user", "content": taken + "<|eos|>"}]))


def test_tokens_that_are_words_of_the_model_are_named() -> None:
    assert TOKENIZERS["byte-level"].spelled.find_ambiguous() == []
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "<s>": 2, "[x]": 3}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<s>"])
    assert Tokenizer(words, special_tokens={"eos_token": "[x]"}).spelled.find_ambiguous() == ["<s>", "[x]"]
