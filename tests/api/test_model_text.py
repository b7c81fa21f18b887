"""What the front reads from a model's folder, tested with the embedded model."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.api.model_text import load_model_text
from shardline.config.engine import EngineConfig
from tests.text import builders


def test_the_demo_model_can_chat() -> None:
    text = load_model_text(EngineConfig())
    assert text.tokenizer is not None
    assert text.chat_template is not None
    assert text.eos_token_ids
    assert text.vocab_size >= text.tokenizer.vocab_size
    prompt = text.chat_template.render([{"role": "user", "content": "What does os.path.join do?"}])
    ids = text.tokenizer.encode_text(prompt, add_special_tokens=False)
    assert text.tokenizer.decode(ids, skip_special_tokens=False) == prompt


def test_the_tokenizer_may_come_from_elsewhere(tmp_path: Path) -> None:
    folder = builders.save_folder(tmp_path, builders.byte_level_json())
    text = load_model_text(EngineConfig.from_options(tokenizer=str(folder)))
    assert text.tokenizer is not None
    assert text.tokenizer.token_id("<|assistant|>") == 3
    assert text.eos_token_ids[-1] == text.tokenizer.token_id("<|eos|>")


def test_no_such_model() -> None:
    with pytest.raises(ValueError, match="/no/such/folder"):
        load_model_text(EngineConfig.from_options(model="/no/such/folder"))
