"""Features meet the sequences and steps that ask for them, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.messages.request import Constraints, Request
from shardline.runtime.features.base import Feature, RunningStep
from shardline.runtime.features.constraints import ConstraintRows
from shardline.runtime.features.digests import Digests
from shardline.runtime.features.drafts import Drafts
from shardline.runtime.features.prompt_embeds import PromptRows
from shardline.runtime.features.scores import Scores
from shardline.runtime.sequences import WorkerSequence
from shardline.sampling_params import SamplingParams
from tests.exactness.harness import run, start_engine
from tests.models.checkpoints import make_checkpoint


@pytest.mark.parametrize(
    ("asked", "met"),
    [
        ({}, set()),
        ({"logits_digest": True}, {Digests}),
        ({"prompt_logprobs": 1}, {Scores}),
        ({"constraints": Constraints(allowed_token_ids=(3, 4))}, {ConstraintRows}),
    ],
    ids=str,
)
def test_only_what_is_asked_for_is_met(
    asked: dict[str, object], met: set[type[Feature]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    for feature in (ConstraintRows, Digests, Drafts, PromptRows, Scores):

        def begin(self: Feature, running: RunningStep, begin=feature.begin) -> Feature | None:  # type: ignore[no-untyped-def]
            seen.add(type(self))
            return begin(self, running)

        def start(self: Feature, sequence: WorkerSequence, start: object, begin=feature.start_sequence) -> None:  # type: ignore[no-untyped-def]
            seen.add(type(self))
            begin(self, sequence, start)

        monkeypatch.setattr(feature, "begin", begin)
        monkeypatch.setattr(feature, "start_sequence", start)
    constraints = asked.pop("constraints", None)
    params = SamplingParams(max_tokens=3, seed=0, **asked)  # type: ignore[arg-type]
    request = Request(request_id="r", prompt_token_ids=[5, 6, 7], sampling=params, constraints=constraints)  # type: ignore[arg-type]
    engine, executor = start_engine(make_checkpoint("llama", tmp_path), device="cpu")
    try:
        assert len(run(engine, [request], "together")["r"].token_ids) == 3
    finally:
        engine.close()
        executor.close()
    assert seen == met
