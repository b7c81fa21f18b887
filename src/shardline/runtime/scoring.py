"""How likely a model finds given texts, and how much another version of the model differs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.deployment.deployment import Deployment, KVAllocation
from shardline.runtime.machines import open_backend
from shardline.runtime.parallel.groups import make_single_rank_groups
from shardline.runtime.step import Rows, StepInput
from shardline.runtime.worker import Worker


class Document(NamedTuple):
    """A text as token ids. Each token from index `first` on is scored, given all tokens before it."""

    token_ids: Sequence[int]
    first: int


@dataclasses.dataclass(frozen=True)
class Quality:
    """How a model compares with a reference, over the same tokens."""

    num_tokens: int
    perplexity: float
    reference_perplexity: float
    top1_agreement: float
    """Share of positions at which both models find the same token most likely."""
    mean_difference: float
    """Mean absolute difference of the log-probabilities that both models give to the text's tokens."""
    max_difference: float
    kl_divergence: float
    """Mean Kullback-Leibler divergence of a position's distribution from the reference's, in nats."""


class Scorer:
    """A model on one rank that runs each text as one step."""

    def __init__(self, deployment: Deployment, longest: int) -> None:
        """`longest`: number of tokens of the longest document."""
        self._block_size = deployment.cache.block_size
        self._num_groups = len(deployment.cache.groups)
        num_blocks = 1 + self._num_groups * -(-longest // self._block_size)
        backend = open_backend(deployment.device, 0, deployment.placements[0][0].threads, deployment.kernels)
        worker = Worker(deployment, backend, make_single_rank_groups())
        worker.load(lambda memory: KVAllocation(num_blocks))
        self._stage = worker.stage

    @torch.inference_mode()
    def logprobs(self, document: Document) -> Tensor:
        """[number of scored tokens, vocab_size]: the log-probabilities of all tokens at the position of each scored
        token."""
        size = len(document.token_ids)
        positions = torch.arange(size)
        blocks_each = -(-size // self._block_size)
        tables, slots = [], []
        for group in range(self._num_groups):
            blocks = torch.arange(blocks_each) + 1 + group * blocks_each
            tables.append(blocks.int()[None])
            slots.append(blocks[positions // self._block_size] * self._block_size + positions % self._block_size)
        scored = positions[document.first - 1 : -1]
        narrowed = Rows(
            positions=scored,
            query_starts=torch.tensor([0, len(scored)], dtype=torch.int32),
            context_lens=torch.tensor([size - 1], dtype=torch.int32),
            block_tables=tuple(tables),
            slots=(),
            replicas=(len(scored),),
            places=scored,
        )
        rows = Rows(
            positions=positions,
            query_starts=torch.tensor([0, size], dtype=torch.int32),
            context_lens=torch.tensor([size], dtype=torch.int32),
            block_tables=tuple(tables),
            slots=tuple(slots),
            replicas=(size,),
            narrowed=narrowed,
            states=torch.zeros(1, dtype=torch.int32),
        )
        step = StepInput(torch.tensor(document.token_ids), rows)
        hidden = self._stage.embed(step)
        return torch.log_softmax(self._stage.forward(self._stage.add_inputs(step, hidden), hidden), dim=-1)


def compare(deployment: Deployment, reference: Deployment, documents: Sequence[Document]) -> Quality:
    """Compare the model of `deployment` with the model of `reference`.

    Raises:
        ValueError: the checkpoint is at fault.
    """
    longest = max(len(document.token_ids) for document in documents)
    model, oracle = Scorer(deployment, longest), Scorer(reference, longest)
    num_tokens, agreeing, largest = 0, 0, 0.0
    total = reference_total = difference_total = divergence_total = 0.0
    for document in documents:
        scored = torch.tensor(document.token_ids[document.first :])[:, None]
        tested, expected = model.logprobs(document), oracle.logprobs(document)
        agreeing += int((tested.argmax(1) == expected.argmax(1)).sum())
        divergence_total += float(kl_divergences(tested, expected).sum())
        tested, expected = tested.gather(1, scored).double(), expected.gather(1, scored).double()
        difference = (tested - expected).abs()
        num_tokens += len(scored)
        total += float(tested.sum())
        reference_total += float(expected.sum())
        difference_total += float(difference.sum())
        largest = max(largest, float(difference.max()))
    return Quality(
        num_tokens=num_tokens,
        perplexity=math.exp(-total / num_tokens),
        reference_perplexity=math.exp(-reference_total / num_tokens),
        top1_agreement=agreeing / num_tokens,
        mean_difference=difference_total / num_tokens,
        max_difference=largest,
        kl_divergence=divergence_total / num_tokens,
    )


def kl_divergences(tested: Tensor, expected: Tensor) -> Tensor:
    """[R] float64: sum of p * (log p - log q) for the log-probabilities log p `expected` and log q `tested` [R, vocab]
    of each row."""
    return (expected.exp() * (expected - tested)).sum(1, dtype=torch.float64)
