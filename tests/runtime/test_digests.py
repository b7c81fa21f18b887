"""The digests of a step's logits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from shardline.messages.step import SequenceResult, SequenceStart, StepPlan
from shardline.runtime.features.base import RunningStep
from shardline.runtime.features.digests import Digests
from shardline.runtime.sampling.sampler import Sampler
from shardline.runtime.sequences import SequenceTable
from shardline.runtime.step import StepInput
from shardline.sampling_params import SamplingParams


def forward(step: StepInput, hidden: Tensor) -> Tensor:
    raise AssertionError("not called")


def running(params: Sequence[SamplingParams]) -> RunningStep:
    table = SequenceTable(1, 1)
    rows = [table.start_sequence(SequenceStart(seq_id, [5], 1, one, 0, ())) for seq_id, one in enumerate(params)]
    return RunningStep(StepPlan(1, [], [], []), rows, rows, rows, Sampler.plan_sampling(rows), False, forward)


def test_rows_that_ask_get_the_digest_of_their_logits_before_any_change() -> None:
    step = running([SamplingParams(), SamplingParams(logits_digest=True), SamplingParams(logits_digest=True)])
    digests = Digests().begin(step)
    assert digests is not None
    logits = torch.randn(3, 7)
    expected = [hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in logits]
    for read in step.readers:
        read(logits)
    logits.zero_()  # as penalties change them
    step.copies = step.tensors
    results = digests.result(step, [SequenceResult(seq_id, [1]) for seq_id in range(3)])
    assert [result.digests for result in results] == [None, [expected[1]], [expected[2]]]


def test_steps_without_digests_read_no_logits() -> None:
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.7)):
        step = running([params])
        assert Digests().begin(step) is None
        assert step.readers == []
