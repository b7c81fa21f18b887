"""A checkpoint saved by transformers, served on several ranks, compared with transformers' generate."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.e2e.serving import serve
from tests.forks import ForkServer
from tests.models.checkpoints import make_checkpoint


def test_greedy_tokens_equal(tmp_path: Path, fork_server: ForkServer) -> None:
    model = make_checkpoint("llama", tmp_path / "llama")
    prompt = [17, 4, 99, 23, 150, 77, 31, 8]
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = oracle.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=24, min_new_tokens=24, pad_token_id=0
        )[0, len(prompt) :].tolist()
    flags = ("-tp", "2", "--on-failure", "exit", "--served-model-name", "tiny")
    with serve(str(model), *flags, forks=fork_server) as server:
        stream = server.client().completions.create(
            model="tiny",
            prompt=prompt,
            temperature=0.0,
            max_tokens=24,
            stream=True,
            extra_body={"min_tokens": 24, "return_token_ids": True},
        )
        tokens = [token for chunk in stream for token in chunk.choices[0].token_ids or []]  # type: ignore[attr-defined]
    assert tokens == expected
