"""The log probabilities of a prompt are those that its generation reported, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.engine.engine import Engine
from shardline.messages.request import Request, TokenLogprobs
from shardline.runtime.features import scores as scoring
from tests.exactness.harness import make_requests, start_engine
from tests.models.checkpoints import make_checkpoint

VOCAB_SIZE = 256
TOP = 3


def run(
    engine: Engine, requests: list[Request]
) -> dict[str, tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]]:
    """For each request, its output, the output's log probabilities and the prompt's."""
    found: dict[str, tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]] = {
        request.request_id: ([], [], []) for request in requests
    }
    for request in requests:
        engine.add_request(request)
    while engine.busy:
        for output in engine.step():
            assert not output.error
            tokens, logprobs, prompt_logprobs = found[output.request_id]
            tokens += output.token_ids
            logprobs += output.logprobs or []
            prompt_logprobs += output.prompt_logprobs or []
    return found


def with_params(request: Request, **changes: object) -> Request:
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **changes))


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Request], list]:
    """A model, requests whose prompts are generated texts, and what their generation reported."""
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp("scores") / request.param)
    engine, executor = start_engine(folder, enable_prefix_caching=False)
    plain = [with_params(one, logprobs=TOP, logits_digest=False) for one in make_requests(VOCAB_SIZE, 6)]
    generated = run(engine, plain)
    executor.close()
    whole = []
    for one in plain:
        tokens, _, _ = generated[one.request_id]
        ids = one.prompt_token_ids + tokens
        asked = with_params(one, prompt_logprobs=TOP, logprobs=None, max_tokens=5)
        whole.append(msgspec.structs.replace(asked, prompt_token_ids=ids))
    return folder, whole, [generated[one.request_id][1] for one in plain]


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ((1, 1, 1), {}),
        ((3, 2, 1), {"max_num_batched_tokens": 13}),
        ((2, 1, 1), {"max_num_batched_tokens": 13, "num_gpu_blocks_override": 12, "max_model_len": 140}),
        ((2, 1, 2), {"enable_expert_parallel": True, "max_num_batched_tokens": 20}),
    ],
    ids=["whole", "chunked", "tight", "experts"],
)
def test_prompts_have_the_logprobs_of_their_generation(
    case: tuple[Path, list[Request], list[list[TokenLogprobs]]],
    layout: tuple[int, int, int],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, requests, expected = case
    if "enable_expert_parallel" in options and "moe" not in folder.name:  # lockstep needs experts
        layout, options = (2, 1, 1), {"max_num_batched_tokens": 20}
    monkeypatch.setattr(scoring, "_SCORED_LOGIT_BYTES", 4 * VOCAB_SIZE * 7)  # a few rows at a time
    if "num_gpu_blocks_override" in options:
        requests = [with_params(one, max_tokens=40, ignore_eos=True) for one in requests]
    tensor, pipeline, lockstep = layout
    engine, executor = start_engine(folder, tensor=tensor, pipeline=pipeline, lockstep=lockstep, **options)
    try:
        for attempt in ("cold", "warm"):
            found = run(engine, requests)
            for request, generated in zip(requests, expected, strict=True):
                scores = found[request.request_id][2]
                assert len(scores) == len(request.prompt_token_ids) - 1, attempt
                assert scores[len(scores) - len(generated) :] == generated, attempt
        stats = engine.stats()
        if "num_gpu_blocks_override" in options:
            assert stats.num_preemptions > 0
            return
        # A request that asks for no scores finds the blocks of one that did.
        plain = with_params(requests[0], prompt_logprobs=None)
        run(engine, [msgspec.structs.replace(plain, request_id="plain")])
        assert engine.stats().prefix_hits > stats.prefix_hits
    finally:
        executor.close()
