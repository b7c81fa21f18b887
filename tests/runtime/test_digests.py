"""The digests of a step's logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardline.messages.step import SequenceResult, SequenceStart, StepPlan
from shardline.runtime.features.base import RunningStep
from shardline.runtime.features.digests import Digests
from shardline.runtime.ops.sampling.row_digests import row_digests_reference
from shardline.runtime.sampling.sampler import Sampler
from shardline.runtime.sequences import SequenceTable
from shardline.runtime.step import StepInput
from shardline.sampling_params import SamplingParams
from tests.runtime.ops.helpers import KERNELS


def forward(step: StepInput, hidden: Tensor) -> Tensor:
    raise AssertionError("not called")


def running(params: Sequence[SamplingParams]) -> RunningStep:
    table = SequenceTable(1, 1)
    rows = [table.start_sequence(SequenceStart(seq_id, [5], 1, one, 0, ())) for seq_id, one in enumerate(params)]
    return RunningStep(StepPlan(1, [], [], []), rows, rows, rows, Sampler.plan_sampling(rows), False, forward, ())


def test_rows_that_ask_get_the_digest_of_their_logits_before_any_change() -> None:
    step = running([SamplingParams(), SamplingParams(logits_digest=True), SamplingParams(logits_digest=True)])
    digests = Digests(KERNELS).begin(step)
    assert digests is not None
    logits = torch.randn(3, 7)
    expected = [f"{value % 2**64:016x}" for value in row_digests_reference(logits).tolist()]
    for read in step.readers:
        read(step, logits)
    logits.zero_()  # as penalties change them
    step.copies = step.tensors
    results = digests.result(step, [SequenceResult(seq_id, [1]) for seq_id in range(3)])
    assert [result.digests for result in results] == [None, [expected[1]], [expected[2]]]


def test_steps_without_digests_read_no_logits() -> None:
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.7)):
        step = running([params])
        assert Digests(KERNELS).begin(step) is None
        assert step.readers == []
