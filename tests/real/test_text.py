"""Ids, streamed text and chats of the real model's tokenizer, against transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from shardline.text.chat_template import ChatTemplate, Conversation
from shardline.text.tokenizer import Tokenizer

_PIECES = [
    *"abcXYZ019 .,;:!?'\"()[]{}<>|/\\_-+*=#@\t\n\r",
    *"\u00a0\u2003\u200b\u200d\ufeff\u2581\u0301\u20ac\ud7ff\ue000\uffff\x00\x7f",
    *("  ", "\n\n", "\r\n", "   \n", "'s", "'LL", "1234567890", "3.14", "١٢٣", "४५", "²³", "ⅷ", "_x_"),
    *("the", " The", "HELLO", "naïve", "Straße", "Grüße", "ﬁ", "İstanbul", "Ελληνικά", "Привет", "שלום", "مرحبا"),
    *("नमस्ते", "ไทย", "မြန်မာ", "한국어", "日本語", "漢字かな", "ࠀࠁࠂ", "🙂", "👍🏽", "👩‍👩‍👧", "🇩🇪", "🫠"),
    *("\U0001d518\U0001d52b\U0001d526", "<|im_start|>", "<|im_end|>", "<|im_", "<|endoftext|>", "<repo_name>"),
    *("def f(x):\n    return x", "https://a.b/c?d=e&f", "{\"a\": [1, 2]}", "\\u0041", "C:\\x", "e\u0301", "a" * 40),
]  # fmt: skip


def difficult_texts(count: int) -> list[str]:
    """Scripts, emoji, whitespace, digits, and special tokens spelled in text."""
    rng = random.Random(0)
    return ["".join(rng.choices(_PIECES, k=rng.randint(1, 12))) for _ in range(count)]


def test_ids_and_streams_of_5000_texts(tokenizer: Tokenizer, their_tokenizer: Any) -> None:
    rng = random.Random(1)
    for text in difficult_texts(5000):
        ids = tokenizer.encode_text(text, add_special_tokens=False)
        assert ids == their_tokenizer.encode(text, add_special_tokens=False), text
        cut, pieces = rng.randint(0, len(ids)), []
        detokenizer = tokenizer.detokenizer(ids[:cut], skip_special_tokens=False)
        start = cut
        while start < len(ids):
            size = rng.randint(1, 4)
            pieces.append(detokenizer.add_tokens(ids[start : start + size]))
            start += size
        whole = tokenizer.decode(ids, skip_special_tokens=False)
        assert whole.endswith("".join(pieces) + detokenizer.flush_text()), text
        if cut == 0:
            assert "".join(pieces) + detokenizer.flush_text() == whole == their_tokenizer.decode(ids)


def test_chats(file: Path, tokenizer: Tokenizer, their_tokenizer: Any) -> None:
    template = ChatTemplate.from_folder(file, tokenizer.special_tokens)
    assert template is not None
    user, answer = {"role": "user", "content": " Hi\n"}, {"role": "assistant", "content": "漢字 <b>"}
    for messages in ([user], [{"role": "system", "content": "Be brief."}, user], [user, answer, user]):
        for prompts in (True, False):
            expected = their_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompts)
            assert template.render(Conversation(messages, add_generation_prompt=prompts)) == expected
