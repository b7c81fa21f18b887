"""Drafts change how many steps an answer takes, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest

from shardline.engine.engine import Engine
from shardline.engine.speculative.ngram import PromptLookup
from shardline.messages.request import Constraints, Request, SequenceOutput, TokenLogprobs
from shardline.messages.stats import DraftStats
from shardline.messages.step import SequenceResult
from shardline.runtime.features.drafts import join_rows
from shardline.runtime.guesses import guessed_rows
from shardline.runtime.machines.host.replay import DecodeReplay
from shardline.runtime.sequences import WorkerSequence
from shardline.sampling_params import SamplingParams
from tests.exactness.harness import Answer, Guesses, drafts_allowed, make_requests, start_engine
from tests.models.checkpoints import make_checkpoint

ASKED = {"method": "ngram", "num_speculative_tokens": 4}


def mixed_requests() -> list[Request]:
    """Requests with log probabilities, with those of the prompt, of named and of all tokens too, and with constraints,
    beside plain ones."""
    wanted: list[dict[str, object]] = [
        {"logprobs": 2},
        {"prompt_logprobs": 1, "logprobs": 1},
        {"logprobs": 0, "logprob_token_ids": [3, 200, 5]},
        {"logprobs": 256, "prompt_logprobs": 100},
    ]
    constraints = [None, None, Constraints(allowed_token_ids=tuple(range(5, 250, 3))), None]
    return [
        msgspec.structs.replace(
            request,
            sampling=msgspec.structs.replace(request.sampling, logits_digest=True, **wanted[index % 4]),
            constraints=constraints[index % 4],
        )
        for index, request in enumerate(make_requests(256))
    ]


def run(engine: Engine, requests: list[Request]) -> dict[str, SequenceOutput]:
    """What each request got, all outputs joined."""
    found: dict[str, SequenceOutput] = {}
    for request in requests:
        engine.add_request(request)
    while engine.busy:
        for output in engine.step():
            assert not output.error
            before = found.get(output.request_id)
            if before is not None:
                output = msgspec.structs.replace(
                    output,
                    token_ids=before.token_ids + output.token_ids,
                    logprobs=before.logprobs and before.logprobs + (output.logprobs or []),
                    digests=(before.digests or []) + (output.digests or []),
                    prompt_logprobs=before.prompt_logprobs or output.prompt_logprobs,
                )
            found[output.request_id] = msgspec.structs.replace(output, timeline=None, num_cached_tokens=0)
    return found


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 2)])
def test_answers_of_every_kind_are_the_same(tensor: int, pipeline: int, tmp_path: Path) -> None:
    model, requests = make_checkpoint("llama", tmp_path), mixed_requests()
    engine, executor = start_engine(model)
    expected = run(engine, requests)
    executor.close()
    answers = {name: Answer(one.token_ids, [], "") for name, one in expected.items()}
    guesses, replayed = Guesses(requests, answers), 0
    call = DecodeReplay.__call__

    def counted(replay: DecodeReplay, step: object, hidden: object) -> object:
        nonlocal replayed
        replayed += step.is_replayable and len(step.rows) > len(step.rows.context_lens)  # type: ignore[attr-defined]
        return call(replay, step, hidden)  # type: ignore[arg-type]

    with (
        patch.object(
            PromptLookup, "find_continuation", lambda lookup, tokens, most: guesses.guess(lookup, tokens, most)
        ),
        patch.object(DecodeReplay, "__call__", counted),
        drafts_allowed(),
    ):
        engine, executor = start_engine(
            model, tensor=tensor, pipeline=pipeline, speculative_config=ASKED, max_num_batched_tokens=40
        )
        found = run(engine, requests)
        drafts = engine.stats().drafts
        executor.close()
    assert found == expected
    assert isinstance(drafts, DraftStats)
    assert 0 < drafts.num_accepted < drafts.num_tokens
    assert replayed > 3


def sequence_of(tokens: list[int], draft: list[int], **sampling: Any) -> WorkerSequence:
    sequence = WorkerSequence(1, 0, np.array([*tokens, *draft, 0]), len(tokens), 2, SamplingParams(**sampling), 0, ())
    for token in tokens[2:]:
        sequence.output_counts[token] = sequence.output_counts.get(token, 0) + 1
    sequence.append_guesses(draft)
    return sequence


def test_rows_of_a_draft_know_the_guesses_before_them() -> None:
    sequence = sequence_of([1, 2, 3], [4, 3], frequency_penalty=0.5, min_tokens=2)
    plain = sequence_of([1, 2], [])
    *rows, last = guessed_rows([sequence, plain])
    assert last is plain
    assert [row.num_tokens for row in rows] == [3, 4, 5]
    assert [row.output_counts for row in rows] == [{3: 1}, {3: 1, 4: 1}, {3: 2, 4: 1}]
    assert [row.ends_are_banned for row in rows] == [True, False, False]
    assert (sequence.num_tokens, sequence.output_counts) == (5, {3: 1})
    sequence.take_tokens([4, 7])
    assert sequence.tokens[: sequence.num_tokens].tolist() == [1, 2, 3, 4, 7]
    assert sequence.output_counts == {3: 1, 4: 1, 7: 1}


@pytest.mark.parametrize(
    ("sampled", "kept"),
    [([4, 5, 6], [4, 5, 6]), ([4, 9, 6], [4, 9]), ([9, 5, 6], [9])],
)
def test_tokens_are_kept_up_to_the_first_wrong_guess(sampled: list[int], kept: list[int]) -> None:
    def row(token: int) -> SequenceResult:
        return SequenceResult(1, [token], [TokenLogprobs(-float(token), 1, [], [])], [str(token)])

    other = SequenceResult(2, [8])
    joined = join_rows([[4, 5], []], [*map(row, sampled), other])
    assert joined[0].token_ids == kept
    assert [one.logprob for one in joined[0].logprobs or []] == [-float(token) for token in kept]
    assert joined[0].digests == list(map(str, kept))
    assert joined[1] is other
