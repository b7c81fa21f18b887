"""Headers of GGUF files: whatever the bytes are, a header is read, or one line says what is wrong with the file."""

from __future__ import annotations

import itertools
import struct
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.checkpoints.gguf.checkpoint import GGUFCheckpoint
from shardline.checkpoints.gguf.config import read_config
from shardline.checkpoints.gguf.header import GGUFHeader, read_header
from shardline.checkpoints.gguf.tokenizer import read_chat_templates, read_vocabulary

Tensor = tuple[str, Sequence[int], int, int]


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _file(
    entries: Sequence[tuple[str, bytes]] = (),
    tensors: Sequence[Tensor] = (),
    data: int = 0,
    *,
    version: int = 3,
    num_tensors: int | None = None,
    num_entries: int | None = None,
) -> bytes:
    """A GGUF file: entries are (key, type and value); tensors (name, dims, type, offset); `data` bytes of zeros."""
    counts = len(tensors) if num_tensors is None else num_tensors, len(entries) if num_entries is None else num_entries
    header = b"GGUF" + struct.pack("<IQQ", version, *counts)
    header += b"".join(_string(key) + value for key, value in entries)
    for name, dims, kind, offset in tensors:
        header += _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return header + bytes(-len(header) % 32) + bytes(data)


def _entry(kind: int, form: str, *values: int | float) -> bytes:
    return struct.pack(f"<I{form}", kind, *values)


def test_what_the_library_writes(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_bool("a.flag", True)
    writer.add_int64("a.number", -5)
    writer.add_float64("a.real", 0.25)
    writer.add_array("a.words", ["one", "zwei", "三"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_tensor("t", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    writer.add_tensor("q", np.zeros((5, 34), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(file)
    found = {key: header.metadata[key] for key in ("general.architecture", "a.flag", "a.number", "a.real")}
    assert found == {"general.architecture": "llama", "a.flag": True, "a.number": -5, "a.real": 0.25}
    assert header.strings("a.words") == ["one", "zwei", "三"]
    numbers = header.numbers("a.numbers")
    assert numbers is not None
    assert numbers.tolist() == [1, -2, 3]
    assert (header.strings("missing"), header.numbers("missing")) == ([], None)
    tensor, packed = header.tensors["t"], header.tensors["q"]
    assert (tensor.shape, tensor.row_bytes) == ((2, 3, 4), 16)
    assert file.read_bytes()[tensor.offset :][: tensor.num_bytes] == np.arange(24, dtype=np.float32).tobytes()
    assert (packed.type.name, packed.shape, packed.row_bytes) == ("Q8_0", (5, 32), 34)
    for key, read in (("a.words", header.numbers), ("a.numbers", header.strings), ("a.flag", header.strings)):
        with pytest.raises(ValueError, match=rf"{key} must be an array"):
            read(key)  # type: ignore[operator]


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes, too short"),
    "another format": (b"PK\x03\x04" + bytes(60), "does not begin with GGUF"),
    "version 1": (_file(version=1), "of version 1, which is not supported; convert the model again"),
    "big-endian": (_file(version=3 << 24), "of big-endian"),
    "too many entries": (_file(num_entries=1 << 60), "1152921504606846976 metadata entries, more than fit"),
    "too many tensors": (_file(num_tensors=1 << 31), "2147483648 tensors, more than fit"),
    "key beyond the end": (_file(num_entries=1)[:24] + struct.pack("<Q", 1 << 40) + bytes(99), "1099511627776 bytes"),
    "value beyond the end": (_file([("k", _entry(8, "Q", 1 << 62))]), "4611686018427387904 bytes"),
    "unknown value": (_file([("k", _entry(13, "B", 1))]), "k has unknown type 13"),
    "key twice": (_file([("k", _entry(0, "B", 1))] * 2), "k is there twice"),
    "key of no text": (_file([("k", _entry(8, "Q", 2) + b"\xff\xfe")]), "k is no UTF-8"),
    "array of arrays": (_file([("k", _entry(9, "IQ", 9, 1))]), "k is an array of arrays"),
    "array of what": (_file([("k", _entry(9, "IQ", 77, 1))]), "k is an array of unknown type 77"),
    "long array": (_file([("k", _entry(9, "IQ", 0, 1 << 50))]), "k has 1125899906842624 entries, more than fit"),
    "long strings": (_file([("k", _entry(9, "IQQQ", 8, 2, 1 << 63, 0))]), "k goes beyond the end"),
    "alignment": (_file([("general.alignment", _entry(4, "I", 24))]), "general.alignment must be a power of 2"),
    "dims": (_file([], [("t", [1] * 5, 0, 0)], 32), "tensor t has 5 dims"),
    "no dims": (_file([], [("t", [], 0, 0)], 32), "tensor t has 0 dims"),
    "zero dim": (_file([], [("t", [4, 0], 0, 0)], 32), r"tensor t has shape \[0, 4\]"),
    "huge dims": (_file([], [("t", [1 << 62, 1 << 62], 0, 0)], 32), "tensor t has shape"),
    "unknown tensor": (_file([], [("t", [4], 99, 0)], 32), "tensor t has type 99, which is unknown; supported: F32"),
    "half a block": (_file([], [("t", [48], 2, 0)], 32), "rows of 48 elements, no multiple of Q4_0's 32"),
    "offset": (_file([], [("t", [4], 0, 8)], 64), "begins at 8, which is no multiple of 32"),
    "truncated": (_file([], [("t", [64], 0, 0)], 255), "tensor t ends at byte 320, and the file has 319"),
    "overlap": (_file([], [("s", [16], 0, 0), ("t", [4], 0, 32)], 64), "tensors s and t overlap"),
    "tensor twice": (_file([], [("t", [4], 0, 0), ("t", [4], 0, 32)], 64), "tensor t is there twice"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name: str, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    content, says = BROKEN[name]
    file.write_bytes(content)
    with pytest.raises(ValueError, match=says) as raised:
        read_header(file)
    assert str(raised.value).startswith(str(file))
    assert len(str(raised.value).splitlines()) == 1


def _read_everything(file: Path) -> GGUFHeader:
    checkpoint = GGUFCheckpoint.open(file)
    read_chat_templates(checkpoint.header)
    for read in (lambda: read_config(checkpoint, None), lambda: read_vocabulary(checkpoint.header)):
        try:
            read()
        except ValueError:
            continue
    return checkpoint.header


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file with everything that is read before weights."""
    file = tmp_path_factory.mktemp("gguf") / "x.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_head_count(2)
    writer.add_array("llama.feed_forward_length", [8])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(["a", "b", "ab", "<s>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(3)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _read_everything(file)
    return file.read_bytes()


_NUMBERS = itertools.count()
_MUTATIONS = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.sampled_from(["<B", "<H", "<I", "<Q"]),
        st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1), st.sampled_from([2**31, 2**32 - 1, 2**63, 2**64 - 1])),
    ),
    max_size=4,
)


@settings(max_examples=250, deadline=None)
@given(mutations=_MUTATIONS, cut=st.one_of(st.just(1.0), st.floats(0, 1)))
def test_no_file_does_harm(
    valid: bytes, tmp_path_factory: pytest.TempPathFactory, mutations: list[tuple[float, str, int]], cut: float
) -> None:
    content = bytearray(valid)
    for place, form, value in mutations:
        size = struct.calcsize(form)
        at = int(place * (len(content) - size))
        content[at : at + size] = struct.pack(form, value % (1 << (8 * size)))
    file = tmp_path_factory.getbasetemp() / f"mutated-{next(_NUMBERS)}.gguf"
    file.write_bytes(content[: int(cut * len(content))])
    started = time.monotonic()
    tracemalloc.start()
    message = str(file)
    try:
        _read_everything(file)
    except ValueError as error:
        message = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        file.unlink()
    assert str(file) in message
    assert peak < 1 << 20
    assert time.monotonic() - started < 5.0


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    def part(number: int, count: int, total: int, name: str) -> bytes:
        entries = [("split.no", _entry(2, "H", number)), ("split.count", _entry(2, "H", count))]
        entries.append(("split.tensors.count", _entry(5, "i", total)))
        return _file(entries, [(name, [4], 0, 0)], 32)

    names = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    names[0].write_bytes(part(0, 2, 2, "a"))
    with pytest.raises(ValueError, match=r"lacks 1 of 2 parts of a model: m-00002-of-00002.gguf; download it again"):
        GGUFCheckpoint.open(names[0])
    for content, says in (
        (part(0, 2, 2, "b"), r"part 0 of 2 by its metadata .*, and part 1 of 2 by its name"),
        (part(1, 3, 2, "b"), "part 1 of 3 by its metadata"),
        (part(1, 2, 2, "a")[:-20], "m-00002-of-00002.gguf is corrupt or truncated"),
        (part(1, 2, 2, "a") + bytes(32), "tensor 'a' is in .*m-00002-of-00002.gguf and in m-00001-of-00002.gguf"),
    ):
        names[1].write_bytes(content)
        with pytest.raises(ValueError, match=says):
            GGUFCheckpoint.open(names[1])
        names[1].unlink()
    names[1].write_bytes(part(1, 2, 2, "other"))
    assert set(GGUFCheckpoint.open(names[1]).tensors) == {"a", "other"}
