"""Tokenizers built from the metadata of GGUF files, against the tokenizers from which the metadata was made."""

from __future__ import annotations

import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from shardline.checkpoints.gguf import tokenizer as gguf_tokenizer
from shardline.checkpoints.gguf.header import read_header
from shardline.checkpoints.gguf.tokenizer import SPLITS, read_vocabulary
from shardline.cli.main import main
from shardline.engine.masks.service import MaskAnswer, MaskJob, open_service
from shardline.sampling_params import StructuredOutputsParams
from shardline.structured.grammar import structured_grammar
from shardline.text.chat_template import ChatTemplate, Conversation
from shardline.text.tokenizer import Tokenizer
from tests.models.checkpoints import make_checkpoint
from tests.runtime.loader.gguf_writer import write_gguf

_PROSE = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
TEXTS = [
    "Hello, world!  It's 12345.67 o'clock,\n\n\tisn't IT?\r\n",
    "  two spaces first, and last  ",
    "Füße, naïve café, 漢字かな交じり文, Ελληνικά, 🙂👍🏽",
    "<|im_start|>user\nHi<|im_end|>\n<think> x </think><s>",
    _PROSE[:3000],
    "",
]
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def _write(file: Path, kind: str, values: dict[str, Any], architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_tokenizer_model(kind)
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def _byte_level(pattern: str | None, digits: bool = False, nfc: bool = False) -> tokenizers.Tokenizer:
    """A byte-level BPE like that of GPT-2, Llama 3 or Qwen, trained on a little text."""
    backend = tokenizers.Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if nfc:
        backend.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([_PROSE], trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet))
    backend.add_special_tokens(_SPECIAL)
    backend.add_tokens(["<think>"])
    return backend


def _metadata(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    tokens = [str(backend.id_to_token(i)) for i in range(backend.get_vocab_size())]
    special = {"<think>": 4, **dict.fromkeys(_SPECIAL, 3)}
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [special.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": backend.token_to_id("<|endoftext|>"),
    }


@pytest.mark.parametrize(
    ("pre", "pattern", "options"),
    [
        ("llama-bpe", _LLAMA3, {}),
        ("qwen2", "of transformers", {"nfc": True}),
        ("gpt-2", None, {}),
        ("smollm", None, {"digits": True}),
    ],
)
def test_byte_level(pre: str, pattern: str | None, options: dict[str, bool], tmp_path: Path) -> None:
    if pre == "qwen2":
        from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as pattern
    backend = _byte_level(pattern, **options)
    values = _metadata(backend) | {"tokenizer.ggml.pre": pre}
    ours = Tokenizer.from_folder(_write(tmp_path / "x.gguf", "gpt2", values))
    assert ours is not None
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert ours.encode_text(text) == ids
        assert ours.decode(ids) == backend.decode(ids)
    ends = [backend.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>")]
    assert list(ours.eos_token_ids) == ends
    assert ours.special_token_ids == {backend.token_to_id(token) for token in _SPECIAL}
    assert ours.byte_tokens is not None


_PIECES = {
    "deepseek-llm": ["漢字", "abc", "'", "s", " ", "1234", "\n", "\n", "é", "!"],
    "deepseek-coder": ["漢字", "abc", "'", "s", " ", "1", "2", "3", "4", "\n", "\n", "é", "!"],
    "deepseek-v3": ["漢字", "abc", "'s", " ", "123", "4", "\n\n", "é", "!"],
    "kimi-k2": ["漢字", "abc's", " ", "123", "4", "\n\n", "é", "!"],
    "llama-bpe": ["漢字abc", "'s", " ", "123", "4", "\n\n", "é", "!"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_pieces(pre: str, tmp_path: Path) -> None:
    """What llama.cpp makes of this text, and of all texts in its own tests."""
    values = {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": pre}
    splits = read_vocabulary(read_header(_write(tmp_path / "x.gguf", "gpt2", values))).tokenizer.pre_tokenizer
    text = "漢字abc's 1234\n\né!"
    pieces = [text[start:stop] for _, (start, stop) in splits.pre_tokenize_str(text)]
    assert pieces == _PIECES.get(pre, pieces)
    assert "".join(pieces) == text


def _sentencepiece(tmp_path: Path) -> tuple[tokenizers.Tokenizer, Path]:
    """A tokenizer like Llama 2's, and its GGUF file, in which scores stand for the order of merges."""
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    trained.train_from_iterator([_PROSE], trainers.BpeTrainer(vocab_size=900, special_tokens=specials))
    value = json.loads(trained.to_str())
    value["pre_tokenizer"] = None
    value["added_tokens"] = [token for token in value["added_tokens"] if token["id"] < 3]
    value["decoder"] = json.loads(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ).__getstate__()
    )
    tokens = [trained.id_to_token(i) for i in range(trained.get_vocab_size())]
    file = _write(
        tmp_path / "spm.gguf",
        "llama",
        {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
            "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)],
            "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
            "tokenizer.chat_template.tool_use": "tools",
        },
    )
    return tokenizers.Tokenizer.from_str(json.dumps(value)), file


def test_sentencepiece(tmp_path: Path) -> None:
    backend, file = _sentencepiece(tmp_path)
    ours = Tokenizer.from_folder(file)
    assert ours is not None
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert ours.encode_text(text, add_special_tokens=False) == ids
        assert ours.encode_text(text) == [1, *ids]
        assert ours.decode(ids) == backend.decode(ids)
    assert ours.eos_token_ids == (2,)
    template = ChatTemplate.from_folder(file, ours.special_tokens)
    assert template is not None
    assert template.render(Conversation([{"role": "user", "content": "hi"}])) == "<s>hi"
    assert set(template.sources) == {"default", "tool_use"}


def test_a_grammar_reads_the_tokenizer_of_the_file(tmp_path: Path) -> None:
    _, file = _sentencepiece(tmp_path)
    job = MaskJob(0, [], grammar=structured_grammar(StructuredOutputsParams(regex="[0-9]+")))
    answer = msgspec.msgpack.decode(open_service(str(file))(msgspec.msgpack.encode(job)), type=MaskAnswer)
    assert not answer.error
    assert any(answer.words)


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        ("gpt2", {"tokenizer.ggml.pre": "martian"}, "pre is 'martian': this way of splitting text is not known.*--tok"),
        ("gpt2", {}, "pre is None: this way of splitting text is not known"),
        ("bert", {}, "model is 'bert', which is not supported; supported: gpt2, llama, gemma4; give .* --tokenizer"),
        ("llama", {}, "scores must have 3 numbers"),
        ("gemma4", {}, "merges is missing; give .* --tokenizer"),
        ("llama", {"tokenizer.ggml.bos_token_id": 9}, "bos_token is 9, and there are 3 tokens"),
        ("gpt2", {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["ab"]}, "an entry without a space: 'ab'"),
        ("gpt2", {"tokenizer.ggml.token_type": [1]}, "token_type has 1 numbers for 3 tokens"),
        ("llama", {"tokenizer.ggml.scores": [0.0]}, "scores must have 3 numbers"),
        (
            "gpt2",
            {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "b", "ab", "aa", "bb"]},
            "merges makes only 0 of 3 tokens: it is cut; give .* --tokenizer",
        ),
        (
            "gemma4",
            {"tokenizer.ggml.merges": ["a c", "a b"]},
            "merges joins 'a' and 'c', which needs unknown tokens; give .* --tokenizer",
        ),
    ],
)
def test_what_is_not_known_is_refused(kind: str, values: dict[str, Any], says: str, tmp_path: Path) -> None:
    file = _write(tmp_path / "x.gguf", kind, {"tokenizer.ggml.tokens": ["a", "b", "c"], **values})
    with pytest.raises(ValueError, match=says):
        Tokenizer.from_folder(file)


def test_merges_that_need_missing_tokens(tmp_path: Path) -> None:
    values = {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["a x"]}
    with pytest.raises(ValueError, match=r"x.gguf: .*merges joins 'a' and 'x'.*give the model's own .* --tokenizer"):
        Tokenizer.from_folder(_write(tmp_path / "x.gguf", "gpt2", values))


@pytest.fixture(scope="module")
def large() -> dict[str, list[Any]]:
    """The arrays of a whole vocabulary of 262,144 tokens: 512 letters, and all pairs of two of them."""
    letters = [chr(0x4E00 + number) for number in range(512)]
    pairs = [(left, right) for left in letters for right in letters if left != right]
    tokens = [*letters, *map("".join, pairs)]
    return {"tokens": tokens, "merges": [" ".join(pair) for pair in pairs], "token_type": [1] * len(tokens)}


def _write_arrays(file: Path, arrays: dict[str, list[Any]]) -> Path:
    """As `_write`; the package's writer takes seconds for arrays of this size."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def array(values: list[Any]) -> bytes:
        if isinstance(values[0], str):
            kind, data = 8, b"".join(map(text, values))
        else:
            kind, data = 5, np.array(values, np.int32).tobytes()
        return struct.pack("<IIQ", 9, kind, len(values)) + data

    entries = [text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("gemma4")]
    entries += [text(f"tokenizer.ggml.{key}") + array(values) for key, values in arrays.items() if values]
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries))
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "cut", "says"),
    [
        ("tokens", slice(-512), "merges joins .* and .*, which needs unknown tokens"),
        ("merges", slice(200_000), "merges makes only 200000 of 261632 tokens: it is cut"),
        ("token_type", slice(7), "token_type has 7 numbers for 262144 tokens"),
    ],
)
def test_a_large_tokenizer_that_is_cut(
    key: str, cut: slice, says: str, large: dict[str, list[Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arrays = large | {key: large[key][cut]}
    arrays["token_type"] = arrays["token_type"][: len(arrays["tokens"])]
    file = _write_arrays(tmp_path / "x.gguf", arrays)
    with pytest.raises(ValueError, match=rf"x.gguf: tokenizer\.ggml\.{says}"):
        Tokenizer.from_folder(file)
    if key == "token_type":
        assert main(["serve", "--tokenizer", str(file)]) == 2
        assert re.search(says, capfd.readouterr().err)


def test_gemma_spells_spaces_in_its_own_way(tmp_path: Path) -> None:
    values = {
        "tokenizer.ggml.tokens": ["<unk>", "<bos>", "<eos>", "\u2581", "a", "  ", "\u2581a"],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 4, 1],
        "tokenizer.ggml.scores": [0.0] * 7,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.eot_token_id": 5,
    }
    header = read_header(_write(tmp_path / "x.gguf", "llama", values, "gemma3"))
    vocabulary = read_vocabulary(header)
    found = json.loads(vocabulary.tokenizer.to_str())
    assert found["model"]["merges"] == [["\u2581", "\u2581"], ["\u2581", "a"]]
    assert vocabulary.end_token_ids == (5,)


def test_a_spelled_space_is_as_good_as_a_space(tmp_path: Path) -> None:
    """Runs of spaces are tokens, and none of them may cut a longer run in two."""
    values = {
        "tokenizer.ggml.tokens": ["<unk>", "<bos>", "<eos>", "\u2581", "\n", "  ", "   ", "<tag>"],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 4, 4, 4, 4],
        "tokenizer.ggml.scores": [0.0] * 8,
        "tokenizer.ggml.add_space_prefix": False,
    }
    ours = Tokenizer.from_folder(_write(tmp_path / "x.gguf", "llama", values, "gemma3"))
    assert ours is not None
    for text in ("\n   ", "\n\u2581\u2581 ", "\n\u2581  ", "\n\u2581\u2581\u2581"):
        assert ours.encode_text(text, add_special_tokens=False) == [4, 6]
    assert ours.encode_text("\u2581\u2581<tag>", add_special_tokens=False) == [5, 7]


def test_merges_are_all_pairs(tmp_path: Path) -> None:
    """Those that a loop over all cuts of all tokens finds, the best token first."""
    rng = random.Random(0)
    words = list(dict.fromkeys("".join(rng.choices("ab\u2581\u6f22", k=rng.randint(1, 6))) for _ in range(600)))
    scores = [float(rng.randint(-50, 0)) for _ in words]
    values = {
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *words],
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * len(words)],
        "tokenizer.ggml.scores": [0.0] * 3 + scores,
    }
    header = read_header(_write(tmp_path / "x.gguf", "llama", values))
    ids = {word: number for number, word in enumerate(words)}
    expected = sorted(
        (-scores[ids[word]], ids[word], ids[word[:cut]], ids[word[cut:]])
        for word in words
        for cut in range(1, len(word))
        if word[:cut] in ids and word[cut:] in ids
    )
    merges = json.loads(read_vocabulary(header).tokenizer.to_str())["model"]["merges"]
    assert merges == [[words[left], words[right]] for _, _, left, right in expected]


def test_a_tokenizer_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = _sentencepiece(tmp_path)
    built: list[int] = []
    build = gguf_tokenizer._merges

    def count(*args: Any) -> object:
        built.append(1)
        return build(*args)

    monkeypatch.setattr(gguf_tokenizer, "_merges", count)
    assert Tokenizer.from_folder(file) is not None
    assert built == [1]


def test_tokens_and_embeddings_must_agree(tmp_path: Path) -> None:
    write_gguf(make_checkpoint("llama", tmp_path / "m"), tmp_path / "x.gguf", metadata=_tiny(tokens=7))
    with pytest.raises(ValueError, match=r"tokenizer.ggml.tokens has 7 tokens, and the model \d+ embeddings"):
        Tokenizer.from_folder(tmp_path / "x.gguf")


def _tiny(tokens: int) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [chr(97 + number) for number in range(tokens)],
    }


def test_gemma4(tmp_path: Path) -> None:
    """SentencePiece's tokens, and merges in the file. Some tokens are for the parser of answers."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    own = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator([_PROSE], trainers.BpeTrainer(vocab_size=900, special_tokens=own))
    value = json.loads(trained.to_str())
    tokens = [trained.id_to_token(i) for i in range(trained.get_vocab_size())] + ["<|tool_call>"]
    value["pre_tokenizer"] = None
    value["added_tokens"] = [token for token in value["added_tokens"] if token["id"] in (1, 2, 4)]
    decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    value["decoder"] = json.loads(decoder.__getstate__())
    backend = tokenizers.Tokenizer.from_str(json.dumps(value))
    backend.add_tokens(["<|tool_call>"])
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 3, *[6] * 256, *[1] * (len(tokens) - 262), 4],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in value["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
    }
    ours = Tokenizer.from_folder(_write(tmp_path / "x.gguf", "gemma4", metadata, "gemma4"))
    assert ours is not None
    for text in (*TEXTS, "a<|tool_call>b\n\n\n<turn|>"):
        ids = backend.encode(text).ids
        assert ours.encode_text(text, add_special_tokens=False) == ids
        assert ours.encode_text(text) == [2, *ids]
        assert ours.decode(ids) == backend.decode(ids)
    assert ours.eos_token_ids == (1, 4)
