"""Greedy tokens without logits are those that are found in the logits."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
from torch import Tensor

from shardline.messages.request import Constraints, Request
from shardline.runtime.layers.vocabulary import LMHead
from shardline.sampling_params import SamplingParams
from tests.exactness.harness import make_requests, run, start_engine
from tests.models.checkpoints import make_checkpoint


def greedy_requests() -> list[Request]:
    """Some of them are constrained."""
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    allowed = Constraints(allowed_token_ids=tuple(range(5, 250, 3)))
    constraints = [allowed, None, Constraints(bad_words=((7,), (8, 9))), None]
    return [
        msgspec.structs.replace(request, sampling=sampling, constraints=constraints[index % 4])
        for index, request in enumerate(make_requests(256))
    ]


def with_logits(requests: list[Request]) -> list[Request]:
    """The same, with a digest of the logits for which all of them are computed."""
    return [
        msgspec.structs.replace(r, sampling=msgspec.structs.replace(r.sampling, logits_digest=True)) for r in requests
    ]


@pytest.mark.parametrize("scheme", ["none", "int8", "int4"])
@pytest.mark.parametrize(("family", "tensor", "pipeline"), [("llama", 1, 1), ("llama", 3, 2), ("gemma2", 2, 1)])
def test_tokens(family: str, tensor: int, pipeline: int, scheme: str, tmp_path: Path) -> None:
    model = make_checkpoint(family, tmp_path)
    engine, executor = start_engine(model, tensor=tensor, pipeline=pipeline, quantization=scheme, dtype="bfloat16")
    requests = greedy_requests()
    find_best, calls, masked = LMHead.find_best, 0, 0

    def counted(head: LMHead, hidden: Tensor, allowed: Tensor | None) -> Tensor:
        nonlocal calls, masked
        calls, masked = calls + 1, masked + (allowed is not None)
        return find_best(head, hidden, allowed)

    try:
        expected = run(engine, with_logits(requests), "alone")
        with patch.object(LMHead, "find_best", counted):
            for batch in ("alone", "together"):
                answers = run(engine, requests, batch)
                assert {key: a.token_ids for key, a in answers.items()} == {
                    key: a.token_ids for key, a in expected.items()
                }
            # A softcap makes unlike logits equal, so that all of them are needed.
            assert bool(calls) == bool(masked) == (family != "gemma2")
            mixed = [*requests[:4], *with_logits(requests)[4:]]
            answers = run(engine, mixed, "together")
            assert {key: a.token_ids for key, a in answers.items()} == {key: a.token_ids for key, a in expected.items()}
    finally:
        executor.close()
