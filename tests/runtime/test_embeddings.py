"""Embedded prompts against transformers, in several layouts, with the same bits in all of them."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest
import torch
import transformers

from shardline.api.outputs import EMBEDDING_PARAMS
from shardline.messages.request import Request
from tests.exactness.harness import start_engine
from tests.models.checkpoints import make_checkpoint

VOCAB_SIZE = 256


def embed(model: Path, prompts: list[list[int]], **options: object) -> list[bytes]:
    engine, executor = start_engine(model, dtype="float32", runner="pooling", max_num_batched_tokens=20, **options)  # type: ignore[arg-type]
    try:
        for index, prompt in enumerate(prompts):
            engine.add_request(Request(request_id=str(index), prompt_token_ids=prompt, sampling=EMBEDDING_PARAMS))
        found: dict[str, bytes] = {}
        while engine.busy:
            for output in engine.step():
                assert (output.token_ids, output.finish_reason, output.error) == ([], "stop", "")
                found[output.request_id] = output.embedding
        assert engine.stats().kv_blocks_used == 0
    finally:
        executor.close()
    return [found[str(index)] for index in range(len(prompts))]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_last_hidden_state(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path / family)
    rng = random.Random(1)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(20)]
    prompts = [shared + [rng.randrange(VOCAB_SIZE) for _ in range(size)] for size in (1, 9, 30)] + [[7]]
    vectors = embed(folder, prompts)
    assert embed(folder, prompts, tensor=2, pipeline=2) == vectors
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        for prompt, vector in zip(prompts, vectors, strict=True):
            expected = model(torch.tensor([prompt])).last_hidden_state[0, -1]
            torch.testing.assert_close(torch.tensor(array("f", vector)), expected, rtol=1e-4, atol=1e-4)
