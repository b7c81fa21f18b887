"""`--watermark-config` and its key file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardline.config.engine import EngineConfig
from shardline.config.watermark import WatermarkConfig, parse_watermark
from shardline.watermark.keys import new_key, write_key


def test_text_and_objects_are_read() -> None:
    asked = {"scheme": "synthid", "key_file": "k.json"}
    for given in (asked, json.dumps(asked)):
        config = EngineConfig.from_options(watermark_config=given)
        assert config.model.watermark == WatermarkConfig("synthid", "k.json")
    assert EngineConfig().model.watermark is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kgw", "must be a JSON object"),
        ("[]", "must be a JSON object"),
        ('{"scheme": "kgw", "key": 42}', "unknown key 'key'; known: scheme, key_file"),
        ('{"scheme": "gumbel", "key_file": "k"}', "scheme of watermark_config must be kgw or synthid, got 'gumbel'"),
        ('{"key_file": "k"}', "must be kgw or synthid, got None"),
        ('{"scheme": "kgw"}', "key_file of watermark_config must name a file"),
        ('{"scheme": "kgw", "key_file": 5}', "key_file of watermark_config must name a file"),
    ],
)
def test_other_values_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_options(watermark_config=text)


def test_a_key_of_another_scheme_is_refused(tmp_path: Path) -> None:
    write_key(new_key("kgw"), tmp_path / "key.json")
    for scheme in ("kgw", "synthid"):
        config = parse_watermark(json.dumps({"scheme": scheme, "key_file": str(tmp_path / "key.json")}))
        assert config is not None
        if scheme == "kgw":
            assert config.load_key().hashing_key > 0  # type: ignore[union-attr]
            continue
        with pytest.raises(ValueError, match="is of the scheme kgw, and watermark_config says synthid"):
            config.load_key()


def test_an_engine_that_makes_no_tokens_has_no_mark() -> None:
    with pytest.raises(ValueError, match="runner pooling makes none"):
        EngineConfig.from_options(runner="pooling", watermark_config={"scheme": "kgw", "key_file": "k"})
