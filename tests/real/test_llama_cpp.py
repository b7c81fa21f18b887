"""llama.cpp as a second reference of the real model: `make real LLAMA_CPP=1` installs it, from a wheel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import xllamacpp

from shardline import LLM, SamplingParams
from shardline.text.tokenizer import Tokenizer
from tests.real.conftest import MODEL
from tests.real.test_text import difficult_texts

Ask = Callable[[str, dict[str, Any]], Any]
_PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea, there lived",
    "Die Hauptstadt von Deutschland ist",
]
_STEPS = 8


@pytest.fixture(scope="module")
def ask(file: Path) -> Iterator[Ask]:
    """Post to llama.cpp's own server, which runs in threads of this process."""
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.warmup = 1024, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    server = xllamacpp.Server(params)
    with httpx.Client(base_url=server.listening_address, timeout=300) as client:
        yield lambda path, body: client.post(path, json=body).raise_for_status().json()


def test_ids(ask: Ask, tokenizer: Tokenizer) -> None:
    for text in difficult_texts(5000):
        body = {"content": text, "add_special": False, "parse_special": True}
        assert tokenizer.encode_text(text, add_special_tokens=False) == ask("/tokenize", body)["tokens"], text


def test_greedy_tokens_and_their_log_probabilities(ask: Ask) -> None:
    """llama.cpp rounds activations to 8 bits, so its token may differ where two are nearly as likely."""
    with LLM(model=MODEL, max_model_len=1024, dtype="float32") as llm:
        outputs = llm.generate(_PROMPTS, SamplingParams(max_tokens=_STEPS, temperature=0.0, logprobs=2))
    differences = []
    for output in outputs:
        ids, logprobs = output.outputs[0].token_ids, output.outputs[0].logprobs
        assert output.prompt_token_ids is not None
        assert logprobs is not None
        for step, known in enumerate(logprobs):
            prompt = [*output.prompt_token_ids, *ids[:step]]
            answer = ask("/completion", {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 5})
            [theirs] = answer["completion_probabilities"]
            best, second = sorted((one.logprob for one in known.values()), reverse=True)[:2]
            assert theirs["id"] == ids[step] or best - second < 0.3
            differences.append(abs({one["id"]: one["logprob"] for one in theirs["top_logprobs"]}[ids[step]] - best))
    assert len(differences) == len(_PROMPTS) * _STEPS
    assert max(differences) < 0.5
    assert sum(differences) / len(differences) < 0.1
