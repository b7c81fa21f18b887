"""Embedded and classified prompts against transformers, in several layouts, with the same bits in all of them."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from shardline.api.pooling import pooling_request
from shardline.messages.request import Request
from shardline.sampling_params import SamplingParams
from tests.exactness.harness import start_engine
from tests.models.checkpoints import make_checkpoint, make_classifier

VOCAB_SIZE = 256
LAST, EVERY = pooling_request("embed"), pooling_request("token_embed")


def make_prompts() -> list[list[int]]:
    """Prompts of unlike lengths, with a common prefix that is longer than a block."""
    rng = random.Random(1)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(20)]
    return [shared + [rng.randrange(VOCAB_SIZE) for _ in range(size)] for size in (1, 9, 30)] + [[7]]


def embed(model: Path, prompts: list[list[int]], *params: SamplingParams, **options: object) -> list[bytes]:
    """What the prompts are pooled to with the last of the parameters, once they were run with the ones before."""
    engine, executor = start_engine(model, dtype="float32", max_num_batched_tokens=20, **options)  # type: ignore[arg-type]
    try:
        for one in params or (LAST,):
            for index, prompt in enumerate(prompts):
                engine.add_request(Request(request_id=str(index), prompt_token_ids=prompt, sampling=one))
            found: dict[str, bytes] = {}
            while engine.busy:
                for output in engine.step():
                    assert (output.token_ids, output.finish_reason, output.error) == ([], "stop", "")
                    found[output.request_id] = output.embedding
            assert engine.stats().kv_blocks_used == 0
    finally:
        executor.close()
    return [found[str(index)] for index in range(len(prompts))]


def check(values: bytes, expected: Tensor) -> None:
    found = torch.tensor(array("f", values)).view(expected.shape)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_final_hidden_states(family: str, tmp_path: Path) -> None:
    folder, prompts = make_checkpoint(family, tmp_path / family), make_prompts()
    last = embed(folder, prompts, runner="pooling")
    every = embed(folder, prompts, EVERY, runner="pooling")
    assert embed(folder, prompts, runner="pooling", tensor=2, pipeline=2) == last
    assert embed(folder, prompts, EVERY, runner="pooling", tensor=2, pipeline=2) == every
    # What the first run has cached saves no position whose vector is asked for.
    assert embed(folder, prompts, LAST, EVERY, runner="pooling") == every
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        for prompt, vector, vectors in zip(prompts, last, every, strict=True):
            states = model(torch.tensor([prompt])).last_hidden_state[0]
            check(vectors, states)
            assert vectors.endswith(vector)


@pytest.mark.parametrize(
    ("family", "num_labels"),
    [("llama", 1), ("qwen2", 2), ("qwen3", 3), ("gemma2", 2), ("gpt2", 1), ("mixtral", 2)],
)
def test_classifiers(family: str, num_labels: int, tmp_path: Path) -> None:
    folder, prompts = make_classifier(family, tmp_path, num_labels, tie_word_embeddings=True), make_prompts()
    logits = embed(folder, prompts)
    assert embed(folder, prompts, tensor=2, pipeline=2) == logits
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        for prompt, found in zip(prompts, logits, strict=True):
            check(found, model(torch.tensor([prompt])).logits[0])


def test_a_classifier_does_not_generate(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot generate"):
        start_engine(make_classifier("llama", tmp_path, 2), runner="generate")


def test_a_classifier_of_several_replicas_in_lockstep(tmp_path: Path) -> None:
    folder, prompts = make_classifier("mixtral", tmp_path, 2), make_prompts()
    shared = embed(folder, prompts, lockstep=2, enable_expert_parallel=True)
    assert shared == embed(folder, prompts)
