"""What stands for an engine in a server that renders only."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from shardline.api.async_llm import AsyncLLM
from shardline.api.renderer import Renderer
from shardline.checkpoints.hub import resolve_tokenizer
from shardline.config.engine import EngineConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo model without its weights."""
    return shutil.copytree(resolve_tokenizer("demo"), tmp_path / "model", ignore=lambda *_: ["model.safetensors"])


def test_prompts_are_encoded_without_weights(folder: Path) -> None:
    async def render() -> None:
        llm = AsyncLLM(EngineConfig.from_options(model=str(folder)), connect=Renderer)
        await llm.wait_ready()
        try:
            assert llm.state() == "ready"
            assert llm.model.tokenizer is not None
            assert llm.model.tokenizer.encode_text("dog")
            assert llm.model.max_model_len > 256
            assert "no weights are loaded" in llm.model.report[0]
        finally:
            await llm.close()

    asyncio.run(render())


def test_the_longest_prompt_is_the_users_or_the_models(folder: Path) -> None:
    def longest(asked: int | str | None) -> int:
        config = EngineConfig.from_options(model=str(folder), max_model_len=asked)
        return Renderer(config, 0, lambda event: None).wait_ready().max_model_len

    assert longest(100) == 100
    assert longest("auto") == longest(None)
    with pytest.raises(ValueError, match=r"is more than the \d+ positions this model has"):
        longest(10**7)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="config"):
        longest(None)
