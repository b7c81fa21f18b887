"""The incremental detokenizer against decoding everything at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.text.detokenizer import WindowDetokenizer, make_detokenizer
from shardline.text.tokenizer import Tokenizer
from tests.text import builders

BYTE_LEVEL = builders.tokenizer(builders.byte_level_json())
METASPACE = builders.tokenizer(builders.metaspace_json())
BYTE_FALLBACK = builders.tokenizer(builders.byte_fallback_json())


def stream(tokenizer: Tokenizer, prompt: list[int], pieces: list[list[int]], skip: bool = True) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.add_tokens(piece) for piece in pieces), detokenizer.flush_text()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    # Some ids are beyond the vocabulary, since embeddings are padded.
    return st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40)


def cuts(ids: list[int], sizes: list[int]) -> list[list[int]]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(ids[start : start + size])
        start += size
    return [*pieces, ids[start:]]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte-level", "metaspace"])
@settings(max_examples=300, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(0, 5), max_size=8), skip=st.booleans())
def test_deltas_add_up_to_the_decoded_whole(
    tokenizer: Tokenizer, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    ids = data.draw(ids_of(tokenizer))
    assert "".join(stream(tokenizer, [], cuts(ids, sizes), skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte-level", "metaspace"])
@settings(max_examples=300, deadline=None)
@given(data=st.data(), prompt=st.text("ab éñ你🙂\n", min_size=1, max_size=20), skip=st.booleans())
def test_output_is_what_follows_the_prompts_text(
    tokenizer: Tokenizer, data: st.DataObject, prompt: str, skip: bool
) -> None:
    prompt_ids = [*tokenizer.encode_text(prompt), *tokenizer.encode_text("dog")]
    ids = data.draw(ids_of(tokenizer))
    whole = tokenizer.decode(prompt_ids + ids, skip)
    before = tokenizer.decode(prompt_ids, skip)
    assert before + "".join(stream(tokenizer, prompt_ids, [ids], skip)) == whole


@settings(max_examples=300, deadline=None)
@given(text=st.text("the a.z 你好🙂é", max_size=30), sizes=st.lists(st.integers(0, 5), max_size=8))
def test_byte_fallback_gives_valid_text_back(text: str, sizes: list[int]) -> None:
    ids = BYTE_FALLBACK.encode_text(text)
    assert "".join(stream(BYTE_FALLBACK, [], cuts(ids, sizes))) == text == BYTE_FALLBACK.decode(ids)


@settings(max_examples=300, deadline=None)
@given(ids=ids_of(BYTE_FALLBACK), sizes=st.lists(st.integers(0, 5), max_size=8))
def test_the_text_does_not_depend_on_the_pieces(ids: list[int], sizes: list[int]) -> None:
    assert "".join(stream(BYTE_FALLBACK, [], cuts(ids, sizes))) == "".join(stream(BYTE_FALLBACK, [], [ids]))


def byte_tokens(data: bytes) -> list[int]:
    return [3 + byte for byte in data]


def test_a_shown_character_stays_when_broken_bytes_follow() -> None:
    texts = stream(BYTE_FALLBACK, [], [[token] for token in byte_tokens("你".encode() + b"\xff")])
    assert texts == ["", "", "你", "", "\ufffd"]


def test_half_a_character_is_held_back() -> None:
    ids = BYTE_LEVEL.encode_text("a🦀b")
    texts = stream(BYTE_LEVEL, [], [[token] for token in ids])
    assert "".join(texts) == "a🦀b"
    assert not any("\ufffd" in text for text in texts)
    assert texts.count("") >= 3


def test_half_a_character_at_the_end_becomes_a_replacement() -> None:
    ids = BYTE_LEVEL.encode_text("a🦀")[:-1]
    texts = stream(BYTE_LEVEL, [], [ids])
    assert texts == ["a", "\ufffd"]


def test_a_character_begun_by_the_prompt_is_shown_whole() -> None:
    ids = BYTE_LEVEL.encode_text("a🦀b")
    assert "".join(stream(BYTE_LEVEL, ids[:2], [ids[2:]])) == "🦀b"


def test_a_leading_space_is_kept_after_a_prompt_and_after_special_tokens() -> None:
    dog = METASPACE.encode_text("dog")[0]
    prompt = [*METASPACE.encode_text("the"), METASPACE.token_id("<|assistant|>") or 0]
    assert stream(METASPACE, prompt, [[dog]])[0].startswith(" ")


@pytest.mark.parametrize("skip", [True, False])
def test_work_per_token_is_bounded(skip: bool) -> None:
    """Neither endless broken bytes nor endless special tokens make the window grow."""
    broken = next(i for i in range(BYTE_LEVEL.vocab_size) if BYTE_LEVEL.decode([i]) == "\ufffd")
    eos = BYTE_LEVEL.token_id("<|eos|>")
    assert eos is not None
    for token in (broken, eos):
        detokenizer = WindowDetokenizer(BYTE_LEVEL, [], BYTE_LEVEL.special_token_ids if skip else frozenset())
        text = ""
        for _ in range(500):
            text += detokenizer.add_tokens([token])
            assert len(detokenizer._ids) <= 32
        assert text + detokenizer.flush_text() == BYTE_LEVEL.decode([token] * 500, skip)
