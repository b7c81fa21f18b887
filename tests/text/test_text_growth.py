"""Tokenizers whose rules make texts very long are refused when they are loaded; those of models are not."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, normalizers, pre_tokenizers

from shardline.text.special_tokens import FOREIGN_CODE
from shardline.text.text_growth import check_growth
from shardline.text.tokenizer import Tokenizer
from tests.text import builders


def replace(pattern: str, content: str) -> normalizers.Normalizer:
    return normalizers.Replace(pattern, content)


def charsmap(*texts: str) -> normalizers.Normalizer:
    data = (8).to_bytes(4, "little") + bytes(8) + b"".join(text.encode() + b"\0" for text in texts)
    return normalizers.Precompiled(base64.b64decode(base64.b64encode(data)))


HOSTILE: dict[str, list[normalizers.Normalizer]] = {
    "doubling": [replace("a", "aa")] * 40,
    "alternating": [replace("a", "bb"), replace("b", "aa")] * 20,
    "long": [replace("a", "a" * 100_000)],
    "regex": [normalizers.Replace(tokenizers.Regex("(?=.)"), "xx")] * 8,
    "bytes": [normalizers.ByteLevel()] * 20,
    "prefix": [normalizers.Prepend("x" * 1000)],
    "empty": [replace("", "xy")] * 9,
    "many": [normalizers.NFC()] * 100,
    "map": [charsmap("x" * 18)] * 3,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_normalizer_that_makes_texts_very_long_is_refused(name: str, tmp_path: Path) -> None:
    source = json.loads(builders.byte_level_json())
    source["normalizer"] = json.loads(normalizers.Sequence(HOSTILE[name]).__getstate__())
    builders.save_folder(tmp_path, json.dumps(source))
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be used: the tokenizer's normalizer has .* rules"):
        Tokenizer.from_folder(tmp_path)
    assert time.monotonic() - started < 5


def test_a_pre_tokenizer_that_makes_texts_very_long_is_refused(tmp_path: Path) -> None:
    source = json.loads(builders.byte_level_json())
    doubling = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=True)] * 13)
    source["pre_tokenizer"] = json.loads(doubling.__getstate__())
    builders.save_folder(tmp_path, json.dumps(source))
    with pytest.raises(ValueError, match="the tokenizer's pre-tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_an_error_of_the_library_is_one_line(tmp_path: Path) -> None:
    builders.save_folder(tmp_path, json.dumps({**json.loads(builders.byte_level_json()), "version": "\n"}))
    with pytest.raises(ValueError, match="is not a tokenizer") as caught:
        Tokenizer.from_folder(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_decoder_that_makes_texts_very_long_is_refused(tmp_path: Path) -> None:
    source = json.loads(builders.metaspace_json())
    source["decoder"] = json.loads(decoders.Sequence([decoders.Replace("a", "aa")] * 40).__getstate__())
    builders.save_folder(tmp_path, json.dumps(source))
    with pytest.raises(ValueError, match="the tokenizer's decoder"):
        Tokenizer.from_folder(tmp_path)


MODELS: dict[str, list[normalizers.Normalizer]] = {
    "llama 2": [normalizers.Prepend("▁"), replace(" ", "▁")],
    "albert": [
        replace("``", '"'),
        replace("''", '"'),
        normalizers.NFKD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        charsmap("a", "x" * 18),
        normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
    ],
    "bert": [normalizers.BertNormalizer()],
    "clip": [normalizers.NFC(), normalizers.Replace(tokenizers.Regex(r"\s+"), " "), normalizers.Lowercase()],
    "dots and dashes": [replace("…", "..."), replace("—", "---"), replace("½", "1/2"), replace("©", "(c)")],
}


@pytest.mark.parametrize("name", MODELS)
def test_normalizers_of_models_are_taken(name: str) -> None:
    check_growth(normalizers.Sequence(MODELS[name]), "normalizer")


CHARS = "abé"
RULES = st.one_of(
    st.builds(replace, st.text(CHARS, max_size=2), st.text(CHARS, max_size=3)),
    st.builds(normalizers.Prepend, st.text(CHARS, min_size=1, max_size=2)),
    st.builds(lambda content: normalizers.Replace(tokenizers.Regex("b*"), content), st.text(CHARS, max_size=2)),
    st.just(normalizers.ByteLevel()),
)


@given(rules=st.lists(RULES, min_size=1, max_size=4), text=st.text(CHARS, min_size=1, max_size=8))
@settings(deadline=None, max_examples=150)
def test_no_text_grows_more_than_the_bound(rules: list[normalizers.Normalizer], text: str) -> None:
    normalizer = normalizers.Sequence(rules)
    try:
        bound = check_growth(normalizer, "normalizer")
        with FOREIGN_CODE:  # some rules make the library panic
            size = len(normalizer.normalize_str(text))
    except ValueError:
        return
    # A rule that matches between characters also matches at the end, once more than there are characters.
    assert size <= bound * (len(text) + 1)
