"""How many log probabilities a request may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardline.sampling_params import SamplingParams

MAX_NAMED_LOGPROBS = 128
"""The most tokens of `logprob_token_ids`, as in vLLM."""
_FEW_LOGPROBS = 64
MAX_LOGPROBS = 10_000_000
"""The most log probabilities that a request may ask for, if it asks for more than a few at each token."""


@dataclass(frozen=True)
class LogprobCounts:
    """Counts the log probabilities that requests ask for, within the bounds of one model.

    Args:
        vocab_size: rows of the embedding.
        max_logprobs: the most at each token; -1: the whole vocabulary.
    """

    vocab_size: int
    max_logprobs: int

    @property
    def most(self) -> int:
        """The most log probabilities at each token."""
        return self.vocab_size if self.max_logprobs == -1 else min(self.max_logprobs, self.vocab_size)

    def count_all(self, params: SamplingParams, num_prompt_tokens: int, room: int) -> dict[str, int | None]:
        """The numbers of log probabilities at each token, without -1.

        Raises:
            ValueError: they are more than the model's, or than memory can hold.
        """
        counts: dict[str, int | None] = {}
        total = 0
        for name, num_tokens in (
            ("logprobs", params.n * min(params.max_tokens or room, room)),
            ("prompt_logprobs", num_prompt_tokens),
        ):
            count = getattr(params, name)
            if name == "logprobs" and params.logprob_token_ids is not None:
                _check_named(params.logprob_token_ids, count)
                count = 0
            counts[name] = count = self.count(name, count)
            total += num_tokens * count if count is not None and count > _FEW_LOGPROBS else 0
        if total > MAX_LOGPROBS:
            raise ValueError(
                f"logprobs and prompt_logprobs ask for {total} log probabilities, and at most {MAX_LOGPROBS} are "
                "reported of one request; ask for fewer tokens, or for those of logprob_token_ids"
            )
        return counts

    def count(self, name: str, count: int | None) -> int | None:
        """How many log probabilities at each token the parameter `name` asks for; None: none.

        Raises:
            ValueError: they are more than the engine was started for.
        """
        count = self.vocab_size if count == -1 else count
        if count is not None and count > self.most:
            raise ValueError(
                f"{name} must be in [0, {self.most}], got {count}, which is greater than max allowed: {self.most} "
                "(--max-logprobs; -1 is the whole vocabulary)"
            )
        return count


def _check_named(token_ids: Sequence[int], count: int | None) -> None:
    """Refuse `logprob_token_ids` that are too many, or not as many as `logprobs`."""
    if not 1 <= len(token_ids) <= MAX_NAMED_LOGPROBS:
        raise ValueError(
            f"logprob_token_ids must have 1 to {MAX_NAMED_LOGPROBS} token ids, got {len(token_ids)}, "
            f"max allowed: {MAX_NAMED_LOGPROBS}"
        )
    if count is not None and count != len(token_ids):
        raise ValueError(
            f"logprobs must equal len(logprob_token_ids), or be left out; they are {count} and {len(token_ids)}"
        )
