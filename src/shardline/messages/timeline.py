"""Where the time of a request went: what the engine notes of each choice, and what users see of it."""

from __future__ import annotations

import msgspec


class PrefillChunk(msgspec.Struct, frozen=True, array_like=True):
    """A step's part of a prompt, or of tokens that were computed again after a preemption.

    `start` is the position of its first token. `at` is when its step was planned, in seconds after the engine got the
    request; `seconds` is the time until the step's result.
    """

    start: int
    num_tokens: int
    at: float
    seconds: float


class Preemption(msgspec.Struct, frozen=True, array_like=True):
    """A loss of all blocks because the KV cache was full.

    `at` is in seconds after the engine got the request. `num_lost_tokens` is the most that had to be computed again,
    `seconds` the time until the next token, which is what the preemption cost.
    """

    at: float
    num_lost_tokens: int
    seconds: float


class EngineTimeline(msgspec.Struct, frozen=True, array_like=True):
    """What the engine knows of one choice. Times are in seconds after the engine got the request; -1: not yet."""

    scheduled: float = -1.0
    """When it was first part of a step."""
    first_token: float = -1.0
    prefill_chunks: list[PrefillChunk] = []
    preemptions: list[Preemption] = []
    num_guessing_steps: int = 0
    """Steps that computed guesses with its tokens."""
    num_guesses: int = 0
    """Guesses that were computed with its tokens."""
    num_right_guesses: int = 0
    """Those of them that were right."""


class ChoiceMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one choice went, in seconds. None: it has not come so far."""

    index: int
    finish_reason: str | None
    num_generation_tokens: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    queued_seconds: float | None
    """In the engine, before its first step."""
    prefill_seconds: float | None
    """From its first step to its first token."""
    first_token_seconds: float | None
    """From the request's arrival to its first token."""
    decode_seconds: float | None
    """From its first token to its last one."""
    prefill_chunks: list[PrefillChunk]
    preemptions: list[Preemption]
    num_guessing_steps: int = 0
    """Steps that computed guesses with its tokens; the engine says so with its last one, so not if a stop string ends
    it."""
    num_guesses: int = 0
    """Guesses that were computed in them; divided by the steps, it is the mean length that was planned."""
    num_right_guesses: int = 0
    """Those of them that were right."""

    @property
    def preempted_seconds(self) -> float:
        """What all preemptions cost."""
        return sum(one.seconds for one in self.preemptions)


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a request went. The fields before `choices` have vLLM's names and are those of choice 0."""

    arrival_time: float
    """Seconds since 1970."""
    queued_ts: float = 0.0
    """This and the following times are time.monotonic(); 0: not yet."""
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    """Seconds from arrival to the first token."""
    num_generation_tokens: int = 0
    choices: list[ChoiceMetrics] = []
