"""The messages that travel through Shardline, in the order in which a request becomes them.

`Request -> StepPlan -> StepResult -> SequenceOutput -> RequestOutput`. Every message between processes is a frozen
msgspec struct, so that msgpack with a declared type is the only wire format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from shardline.sampling_params import SamplingParams
from shardline.timeline import EngineTimeline, RequestMetrics

FinishReason = Literal["stop", "length", "abort", "error"]


class Constraints(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens an output may have, whatever their logits are."""

    grammar: str = ""
    """A grammar's text, see `structured.grammar`; empty: there is none."""
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all tokens."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the output must not contain."""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of one user request, as the engine sees it: token ids only.

    A user request with n > 1 becomes n of these, which differ only in `request_id` and `choice`.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    """`seed` and `max_tokens` are never None here."""
    output_token_ids: list[int] = []
    """Tokens that a replica generated before it failed; the output goes on after them."""
    choice: int = 0
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    """Requests with a lower number run first."""
    arrival_time: float = 0.0
    """Seconds, time.monotonic() of the front process."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""
    constraints: Constraints | None = None
    streamed: bool = True
    """Whether the user reads the tokens as they come. If not, the engine may send several tokens in one message."""


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
    draft: list[int] = []
    """Guesses of the tokens after the one at `start`. The step computes these too, and samples a token at each of its
    positions; `num_tokens` includes them. The result has the tokens up to the first that differs from its guess."""
    allowed: bytes = b""
    """The tokens that the sequence's grammar allows next, as bits in words of 32; empty: it has no grammar."""

    @property
    def num_samples(self) -> int:
        """Number of tokens that the model's last layer computes: those that are sampled or scored."""
        return self.num_tokens if self.score or self.draft else int(self.sample)


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """What every rank does in one step. It contains only what changed since the last plan."""

    step_id: int
    starts: list[SequenceStart]
    steps: list[SequenceStep]
    ends: list[int]
    """Ids of sequences that workers may forget; they do so before `starts`."""

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


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of one generated token, from the raw logits (before temperature and penalties)."""

    logprob: float
    rank: int
    """Rank of the chosen token by probability; 1: it was the most likely one."""
    top_ids: list[int]
    top_logprobs: list[float]


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
    """The final hidden state of the prompt's last token, float32; empty unless prompts are embedded."""
    refused: bool = False
    """Whether what the request asks for is at fault for the error."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The answer of the last stage to one StepPlan."""

    step_id: int
    results: list[SequenceResult]
    seconds: float = 0.0
    """Wall time of the step in the worker."""


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step produced for one Request: the engine's message to the front."""

    request_id: str
    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    digests: list[str] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The EOS or stop token that ended the sequence; it is the last of `token_ids`."""
    num_cached_tokens: int = 0
    error: str = ""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Those of all prompt tokens but the first, with the first generated token; None: nobody asked for them."""
    embedding: bytes = b""
    """The final hidden state of the prompt's last token, float32; empty unless prompts are embedded."""
    timeline: EngineTimeline | None = None
    """Everything that the engine has noted so far; None: it is as the front has it, apart from further tokens."""
    refused: bool = False
    """Whether what the request asks for is at fault, so that its client gets a 4xx."""


Decode = Callable[[int], str | None]
"""The text of a token id; None: it is not known."""


class Logprob(msgspec.Struct, frozen=True):
    """How likely the model found a token at one position."""

    logprob: float
    rank: int
    """1: the token was the most likely one."""
    decoded_token: str | None


def logprobs_by_token(token_id: int, chosen: TokenLogprobs, decode: Decode) -> dict[int, Logprob]:
    """The log probabilities at one position by token id: first the token there, then the most likely ones."""
    entries = {token_id: Logprob(chosen.logprob, chosen.rank, decode(token_id))}
    for rank, (other, value) in enumerate(zip(chosen.top_ids, chosen.top_logprobs, strict=True), 1):
        if other not in entries:
            entries[other] = Logprob(value, rank, decode(other))
    return entries


def decode_nothing(token_id: int) -> None:
    """The `Decode` of a model without a tokenizer."""


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One choice of a finished or running request."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    token_logprobs: list[TokenLogprobs] | None = None
    """One entry for each token; None: the request did not ask for them. `logprobs` has them in vLLM's shape."""
    decode: Decode = decode_nothing
    digests: list[str] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the choice; None: it ended otherwise, or has not ended."""
    error: str = ""
    """What happened, if the finish reason is "error"."""
    refused: bool = False
    """Whether what the request asks for is at fault."""
    embedding: bytes = b""
    """The final hidden state of the prompt's last token, float32; empty unless prompts are embedded."""
    shaped_logprobs: list[dict[int, Logprob]] = []
    """What `logprobs` has made so far."""

    def finished(self) -> bool:
        """Whether the choice has ended."""
        return self.finish_reason is not None

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """For each token, its log probability and those of the most likely tokens, by token id.

        None: the request did not ask for them.
        """
        if self.token_logprobs is None:
            return None
        for index in range(len(self.shaped_logprobs), len(self.token_logprobs)):
            chosen = self.token_logprobs[index]
            self.shaped_logprobs.append(logprobs_by_token(self.token_ids[index], chosen, self.decode))
        return self.shaped_logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log probabilities. None: the request did not ask for them."""
        if self.token_logprobs is None:
            return None
        return sum(entry.logprob for entry in self.token_logprobs)


class RequestOutput(msgspec.Struct, kw_only=True):
    """All choices of one user request, with their output so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_token_logprobs: list[TokenLogprobs] | None = None
    """Those of all prompt tokens but the first, once there is output; None: the request did not ask for them."""
    decode: Decode = decode_nothing
    metrics: RequestMetrics | None = None
    """Where the time went; None: the request has not finished."""

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        # A loop costs a third of what `all` and a generator do, for every token.
        for output in self.outputs:  # noqa: SIM110
            if output.finish_reason is None:
                return False
        return True

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """For each prompt token, its log probability and those of the most likely tokens, by token id.

        The first token has None, since nothing precedes it. None instead of a list: the request did not ask for them.
        """
        if self.prompt_token_logprobs is None:
            return None
        pairs = zip(self.prompt_token_ids[1:], self.prompt_token_logprobs, strict=True)
        return [None, *(logprobs_by_token(token_id, chosen, self.decode) for token_id, chosen in pairs)]
