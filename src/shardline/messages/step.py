"""A step: the plan that every rank runs, and the result that the last stage answers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardline.messages.copies import BlockCopies, CopyResult
from shardline.messages.request import Constraints, PromptEmbeds, TokenLogprobs
from shardline.sampling_params import SamplingParams


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """What a worker needs to know about a sequence before its first step, and again after a preemption."""

    seq_id: int
    token_ids: list[int]
    """The prompt, followed by the tokens generated before a preemption or by another replica."""
    num_prompt_tokens: int
    sampling: SamplingParams
    choice: int
    eos_token_ids: tuple[int, ...]
    constraints: Constraints | None = None
    """Without the grammar, which the engine follows."""
    embeds: PromptEmbeds | None = None
    adapter: int = -1
    """The slot of its adapter; negative: it has none."""


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's part of a step: compute positions [start, start + num_tokens)."""

    seq_id: int
    start: int
    num_tokens: int
    new_blocks: list[list[int]]
    """For each KV group, the block ids to append to the sequence's block table."""
    token_id: int
    """Token at `start`, if an earlier step generated it and this rank may not know it; -1: the worker knows it."""
    sample: bool
    """Whether a token is sampled from the logits of the last position."""
    score: bool = False
    """Whether the log probabilities of the prompt's tokens after these positions are reported."""
    draft_token_ids: list[int] = []
    """Guesses of the tokens after the one at `start`. The step computes these too, and samples a token at each of its
    positions; `num_tokens` includes them. The result has the tokens up to the first that differs from its guess."""
    allowed: bytes = b""
    """The tokens that the sequence's grammar allows at each position that is sampled, as bits in words of 32; empty: it
    has no grammar."""
    num_guesses: int = 0
    """How many guesses the result is to have of the tokens after those that are sampled, if a model drafts."""

    @property
    def num_samples(self) -> int:
        """Number of tokens that the model's last layer computes: those that are sampled or scored."""
        return self.num_tokens if self.score or self.draft_token_ids else int(self.sample)

    @property
    def num_newest(self) -> int:
        """The newest token and the guesses behind it; from each of them a token is sampled, if any is."""
        return 1 + len(self.draft_token_ids)

    @property
    def decodes(self) -> bool:
        """Whether it computes the newest token, and perhaps guesses of the next ones, and nothing else."""
        return self.sample and self.num_tokens == self.num_newest


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """What every rank does in one step. It contains only what changed since the last plan. `steps` may be empty."""

    step_id: int
    starts: list[SequenceStart]
    steps: list[SequenceStep]
    ends: list[int]
    """Ids of sequences that workers may forget; they do so before `starts`."""
    copies: BlockCopies | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens that this step computes."""
        return sum(step.num_tokens for step in self.steps)

    @property
    def num_samples(self) -> int:
        """Number of tokens that the model's last layer computes: those that are sampled or scored."""
        return sum(step.num_samples for step in self.steps)


class RankStep(msgspec.Struct, frozen=True, array_like=True):
    """The message that starts a step on a rank: its replica's plan, and the load of all replicas in lockstep."""

    plan: StepPlan
    replica_tokens: tuple[int, ...]
    """For each replica in lockstep, this one included: the number of tokens that its plan computes."""
    replica_samples: tuple[int, ...]
    """For each replica in lockstep, this one included: the number of tokens that its plan samples."""


def rank_steps(plans: Sequence[StepPlan]) -> list[RankStep]:
    """For each replica in lockstep, the message that starts the step with these plans, one of each replica."""
    replica_tokens = tuple(plan.num_tokens for plan in plans)
    replica_samples = tuple(plan.num_samples for plan in plans)
    return [RankStep(plan, replica_tokens, replica_samples) for plan in plans]


class SequenceResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step produced for one sequence."""

    seq_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    digests: list[str] | None = None
    """A digest of the fp32 logits row of each token; None: the request did not ask for it."""
    error: str = ""
    """Why the tokens are invalid and the sequence must end; empty: they are valid."""
    finished: bool = False
    """Whether the sequence's grammar is at its end after the last token; ranks do not know."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Those of the prompt's tokens after the step's positions; None: the step scored none."""
    embedding: bytes = b""
    """float32 [num_samples, size]: the final hidden states, or the labels' logits, of the step's last positions; empty
    unless prompts are embedded."""
    refused: bool = False
    """Whether what the request asks for is at fault for the error."""
    guesses: list[int] = []
    """What the draft model expects after `token_ids`; empty: nothing was asked of it, or it is not there yet."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one StepPlan: of the replica's driver, and of every rank if the plan copies blocks."""

    step_id: int
    results: list[SequenceResult]
    seconds: float = 0.0
    """Wall time of the step in the worker."""
    copied: CopyResult | None = None
    """None: the plan has no copies."""
