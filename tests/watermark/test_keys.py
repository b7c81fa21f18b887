"""Key files: what is taken, and the line that says what is wrong with all others."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from shardline.watermark import SCHEMES, Scheme
from shardline.watermark.keys import KGWKey, SynthIDKey, key_name, new_key, read_key, write_key


def test_files_of_transformers_are_keys(tmp_path: Path) -> None:
    from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

    WatermarkingConfig(hashing_key=99, context_width=3).to_json_file(tmp_path / "kgw.json")
    assert read_key(tmp_path / "kgw.json") == KGWKey(hashing_key=99, context_width=3)
    SynthIDTextWatermarkingConfig(ngram_len=4, keys=[5, -6]).to_json_file(tmp_path / "synthid.json")
    assert read_key(tmp_path / "synthid.json") == SynthIDKey(ngram_len=4, keys=(5, -6))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_new_key_is_random_and_its_owners_only(scheme: Scheme, tmp_path: Path) -> None:
    key, path = new_key(scheme), tmp_path / "key.json"
    write_key(key, path)
    assert read_key(path) == key != new_key(scheme)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key_name(key) == key_name(read_key(path))
    assert "secret" in repr(key)
    assert not any(str(number) in repr(key) for number in json.loads(path.read_text()).values())
    with pytest.raises(ValueError, match="give another name, or move the file away"):
        write_key(key, path)
    with pytest.raises(ValueError, match="cannot be written: No such file or directory"):
        write_key(key, tmp_path / "none" / "key.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "must be a JSON object"),
        (b"[1]", "must be a JSON object"),
        (b"{}", "must have hashing_key"),
        (b'{"scheme": "gumbel", "key": 42}', "scheme must be kgw or synthid"),
        (b'{"hashing_key": "15485863"}', "Expected `int`"),
        (b'{"hashing_key": 0}', "hashing_key must be"),
        (b'{"hashing_key": 9223372036854775808}', "hashing_key must be"),
        (b'{"hashing_key": 1, "greenlist_ratio": 1.0}', "greenlist_ratio must be"),
        (b'{"hashing_key": 1, "seeding_scheme": "x"}', "Invalid enum value"),
        (b'{"hashing_key": 1, "context_width": 0}', "context_width must be"),
        (b'{"hashing_key": 1, "gamma": 0.5}', "unknown field `gamma`"),
        (b'{"keys": []}', "keys must have 1 to 64 numbers, got 0"),
        (json.dumps({"keys": list(range(65))}).encode(), "keys must have 1 to 64 numbers, got 65"),
        (b'{"keys": [1, 65537]}', "keys must differ"),
        (b'{"keys": [18446744073709551616]}', "64 bits"),
        (b'{"keys": [1], "ngram_len": 1}', "ngram_len must be"),
        (b'{"keys": [1], "debug_mode": true}', "debug_mode must be false"),
        (b" " * 70_000, "at most 65536 bytes"),
    ],
)
def test_what_is_no_key_is_refused_in_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_key(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json cannot be read: No such file"):
        read_key(tmp_path / "none.json")
    with pytest.raises(ValueError, match="Is a directory"):
        read_key(tmp_path)
