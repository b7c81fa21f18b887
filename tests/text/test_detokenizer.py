"""The incremental detokenizer against decoding everything at once."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.text.tokenizer import Tokenizer
from shardline.text.window_detokenizer import WindowDetokenizer
from tests.text import builders

BYTE_LEVEL = builders.tokenizer(builders.byte_level_json())
METASPACE = builders.tokenizer(builders.metaspace_json())
BYTE_FALLBACK = builders.tokenizer(builders.byte_fallback_json())
GEMMA = builders.tokenizer(builders.gemma_json())


def stream(tokenizer: Tokenizer, prompt: list[int], pieces: list[list[int]], skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip)
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


def joined_bytes(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(token_id) for token_id in ids)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK, GEMMA], ids=["byte-level", "llama2", "gemma"])
@settings(max_examples=500, deadline=None)
@given(
    garbage=st.binary(max_size=6),
    before=st.text("the ▁aࠀࠁ你🙂é", max_size=12),
    after=st.text("the ▁aࠀࠁ你🙂é", max_size=16),
    cut=st.integers(0, 4),
    sizes=st.lists(st.integers(0, 5), max_size=8),
)
def test_the_text_of_the_answers_ids_after_any_prompt(
    tokenizer: Tokenizer, garbage: bytes, before: str, after: str, cut: int, sizes: list[int]
) -> None:
    """A prompt may have broken bytes, and may end inside a character, which the answer then completes."""
    single = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size)) if i > 2}
    broken = [single[bytes([byte])] for byte in garbage]
    ids = [*broken, *tokenizer.encode_text(before), *tokenizer.encode_text(after)]
    end = min(len(ids), len(broken) + len(tokenizer.encode_text(before)) + cut)
    prompt, answer = ids[:end], ids[end:]
    data = joined_bytes(tokenizer, prompt)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    half, _ = decoder.getstate()
    expected = (half + joined_bytes(tokenizer, answer)).decode("utf-8", "replace") if answer else ""
    if not prompt and tokenizer is BYTE_FALLBACK:
        expected = expected.removeprefix(" ")
    assert "".join(stream(tokenizer, prompt, cuts(answer, sizes))) == expected


def test_an_answer_after_a_prompt_of_byte_tokens() -> None:
    prompt, answer = byte_tokens("ࠀࠁࠂࠃ".encode()), byte_tokens("ࠄࠅࠆ".encode())
    for size in range(len(answer)):
        ids = [*prompt, *answer]
        end = len(prompt) + size
        shown = "ࠄࠅࠆ"[size // 3 :]
        assert "".join(stream(BYTE_FALLBACK, ids[:end], [[token] for token in ids[end:]])) == shown
    assert stream(BYTE_FALLBACK, byte_tokens(b"\xe0\xa0"), []) == [""]
    assert stream(BYTE_FALLBACK, byte_tokens(b"\xff"), [BYTE_FALLBACK.encode_text("the")]) == [" the", ""]


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
