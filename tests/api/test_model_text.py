"""What the front reads from a model's folder, tested with the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardline.api.model_text import load_model_text
from shardline.config.engine import EngineConfig
from tests.models.checkpoints import make_checkpoint
from tests.text import builders


def test_the_demo_model_can_chat() -> None:
    text = load_model_text(EngineConfig())
    assert text.tokenizer is not None
    assert text.chat_template is not None
    assert text.eos_token_ids
    assert text.vocab_size >= text.tokenizer.vocab_size
    prompt = builders.render(text.chat_template, [{"role": "user", "content": "What does os.path.join do?"}])
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


def test_sampling_parameters_come_from_the_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 20, "max_new_tokens": 9, "a": 1}')

    def defaults(**options: object) -> dict[str, object]:
        return dict(load_model_text(EngineConfig.from_options(**options)).sampling_defaults)

    assert defaults() == {}
    assert defaults(generation_config=str(tmp_path)) == {"temperature": 0.5, "top_k": 20, "max_tokens": 9}
    override = {"temperature": 0.25}
    assert defaults(override_generation_config=override, generation_config="vllm") == override
    with pytest.raises(ValueError, match="the generation config cannot be used: temperature must be"):
        defaults(override_generation_config={"temperature": -1})


def test_a_tokenizer_may_be_left_out() -> None:
    text = load_model_text(EngineConfig.from_options(skip_tokenizer_init=True))
    assert (text.tokenizer, text.chat_template) == (None, None)
    assert text.eos_token_ids


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_vectors_that_are_not_the_last_tokens_are_refused(mode: str, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False, f"pooling_mode_{mode}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**pooling, "include_prompt": True}))
    config = EngineConfig.from_options(model=str(folder), runner="pooling")
    if mode == "lasttoken":
        assert load_model_text(config).pooler
    else:
        with pytest.raises(ValueError, match=r"config.json makes a vector of all tokens \(mean_tokens\).*token_embed"):
            load_model_text(config)
    assert load_model_text(EngineConfig.from_options(model=str(folder))), "text does not depend on it"
