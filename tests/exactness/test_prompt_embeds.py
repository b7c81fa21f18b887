"""A prompt of embedded tokens has the answer of the tokens themselves, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file

from shardline.api.prompt_embeds import join_parts
from shardline.engine.engine import Engine
from shardline.messages.request import Request
from tests.exactness.harness import make_requests, start_engine
from tests.models.checkpoints import make_checkpoint

VOCAB_SIZE = 256


def run(engine: Engine, requests: list[Request]) -> dict[str, tuple[list[int], list[str]]]:
    """The tokens and the digests of each request."""
    found: dict[str, tuple[list[int], list[str]]] = {request.request_id: ([], []) for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.busy:
        for output in engine.step():
            assert not output.error
            found[output.request_id][0].extend(output.token_ids)
            found[output.request_id][1].extend(output.digests or [])
    return found


def embedded(request: Request, table: np.ndarray, *, first: int) -> Request:
    """The same request, with rows of the embedding from its token `first` on to its last but two."""
    ids = request.prompt_token_ids
    last = max(first, len(ids) - 2)
    mixed, embeds = join_parts([ids[:first], table[ids[first:last]], ids[last:]])
    assert len(mixed) == len(ids)
    return msgspec.structs.replace(request, prompt_token_ids=mixed, embeds=embeds, cache_salt=request.request_id)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Request], dict]:
    """A model, requests without penalties, which count ids, and their answers."""
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp("embeds") / request.param)
    plain = [
        msgspec.structs.replace(
            one,
            sampling=msgspec.structs.replace(
                one.sampling, repetition_penalty=1.0, logits_digest=True, prompt_logprobs=None
            ),
        )
        for one in make_requests(VOCAB_SIZE, 6)
    ]
    engine, executor = start_engine(folder)
    answers = run(engine, plain)
    executor.close()
    weights = load_file(folder / "model.safetensors")
    [table] = [value for name, value in weights.items() if name.endswith(("embed_tokens.weight", "wte.weight"))]
    rows = table.float().numpy()
    mixed = [embedded(one, rows, first=index % 3) for index, one in enumerate(plain)]
    return folder, mixed, answers


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ((1, 1), {}),
        ((2, 2), {"max_num_batched_tokens": 13}),
        ((1, 1), {"max_num_batched_tokens": 13, "num_gpu_blocks_override": 12, "max_model_len": 140}),
    ],
    ids=["whole", "split", "tight"],
)
def test_rows_of_the_embedding_are_as_good_as_its_tokens(
    case: tuple[Path, list[Request], dict], layout: tuple[int, int], options: dict[str, Any]
) -> None:
    folder, requests, answers = case
    engine, executor = start_engine(folder, tensor=layout[0], pipeline=layout[1], **options)
    assert run(engine, requests) == answers
    assert run(engine, requests) == answers, "from the prefix cache"
    assert engine.stats().prefix_hits or "num_gpu_blocks_override" in options
    executor.close()
