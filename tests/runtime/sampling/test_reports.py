"""What rows of logits report of their tokens."""

from __future__ import annotations

import math

import pytest
import torch

from shardline.messages.request import TokenLogprobs
from shardline.runtime.ops.sampling.sample import kept_tokens_reference
from shardline.runtime.sampling.inputs import Draws
from shardline.runtime.sampling.reports import Reports, Wanted, processed_logits, read_reports, report
from tests.runtime.ops.helpers import KERNELS, randn

CHOSEN = torch.tensor([3, 4, 5, 6, 7])
WANTED = [Wanted(2), None, Wanted(500), Wanted(0, (9, 6, 0)), Wanted(0)]


def read(logits: torch.Tensor, rows: list[int], *, as_logits: bool = False) -> list[TokenLogprobs | None]:
    """The reports of some rows, after they were copied."""
    wanted, chosen = [WANTED[row] for row in rows], CHOSEN[rows]
    reports = report(KERNELS, logits[rows], chosen, wanted, as_logits=as_logits)
    return read_reports(Reports.from_copies(reports.list_tensors()), wanted, chosen.tolist())


@pytest.mark.usefixtures("isa")
def test_each_row_reports_what_it_wants(rng: torch.Generator) -> None:
    logits = randn(5, 700, rng=rng)
    few, nothing, many, named, own = read(logits, [0, 1, 2, 3, 4])
    expected = logits.double().log_softmax(1)
    assert nothing is None
    assert few is not None
    assert many is not None
    assert named is not None
    assert own is not None
    assert few.top_ids == logits[0].topk(2).indices.tolist()
    assert many.top_ids == logits[2].topk(500).indices.tolist()
    assert many.top_logprobs == pytest.approx(expected[2, many.top_ids].tolist(), rel=1e-5)
    assert named.top_ids == [6, 9, 0], "the chosen token is first, and only once"
    assert named.top_logprobs == pytest.approx(expected[3, [6, 9, 0]].tolist(), rel=1e-5)
    assert named.top_ranks == [1 + int((logits[3] > logits[3, token]).sum()) for token in (6, 9, 0)]
    assert own.top_ids == []
    assert own.logprob == pytest.approx(float(expected[4, 7]), rel=1e-5)


def test_a_report_does_not_depend_on_the_other_rows(rng: torch.Generator) -> None:
    logits = randn(5, 700, rng=rng)
    together = read(logits, [0, 1, 2, 3, 4])
    assert together == [read(logits, [row])[0] for row in range(5)]


def test_reports_of_logits(rng: torch.Generator) -> None:
    logits = randn(5, 700, rng=rng)
    few, _, _, named, _ = read(logits, [0, 1, 2, 3, 4], as_logits=True)
    assert few is not None
    assert named is not None
    assert (few.logprob, few.top_logprobs) == (float(logits[0, 3]), logits[0].topk(2).values.tolist())
    assert named.top_logprobs == logits[3, [6, 9, 0]].tolist()


def test_a_vocabulary_with_fewer_tokens_reports_those() -> None:
    wanted = [Wanted(5)]
    reports = report(KERNELS, torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([0]), wanted, as_logits=True)
    [one] = read_reports(reports, wanted, [0])
    assert one == TokenLogprobs(1.0, 2, [1, 0, 2], [2.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.7, 0, 1.0, 0.0), (1.5, 5, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (0.9, 20, 0.8, 0.05)],
)
def test_processed_logits_are_those_that_may_be_drawn(
    rng: torch.Generator, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = randn(2, 50, rng=rng)
    params = [torch.tensor([value, 0.0]) for value in (temperature, top_k, top_p, min_p)]
    processed, greedy = processed_logits(logits, Draws(*params, *[torch.empty(0)] * 3))
    assert torch.equal(greedy, logits[1])
    kept = kept_tokens_reference(logits[0].numpy(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert (processed > -math.inf).tolist() == (kept > 0).tolist()
    alive = processed > -math.inf
    torch.testing.assert_close(processed[alive], logits[0][alive] / temperature)
