"""What steps make of all positions of a prompt, if its request asks: log probabilities of its tokens, or embeddings."""

from __future__ import annotations

from shardline.messages.request import TokenLogprobs
from shardline.messages.step import SequenceResult, SequenceStep


class PromptReport:
    """What one sequence's request wants to know, as far as it is known. A preempted sequence keeps it."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens`: of the prompt."""
        self._num_tokens = num_tokens
        self._num_known = 0
        """From how many of the first positions there is something."""
        self.logprobs: list[TokenLogprobs] = []
        """Those of the prompt's tokens from the second one on."""
        self.embedding = b""
        """See `SequenceOutput.embedding`."""

    @property
    def first_missing(self) -> int | None:
        """The first position whose logits tell the log probability of the prompt's next token, which is not known yet.

        None: all are known. If prompts are embedded, it is the first position without a vector; that of the last one
        comes from the step that samples.
        """
        return None if self._num_known + 1 >= self._num_tokens else self._num_known

    def asks(self, start: int, end: int) -> bool:
        """Whether a step that computes these positions must report something of them."""
        first = self.first_missing
        return first is not None and end > first and start + 1 < self._num_tokens

    def note_result(self, step: SequenceStep, result: SequenceResult) -> None:
        """Append what a step reports; a sequence that was preempted may have had some of it before."""
        if result.embedding:
            self.append_embeddings(step.start + step.num_tokens, step.num_samples, result.embedding)
        elif step.score:
            scores = result.prompt_logprobs or []
            self.logprobs += scores[len(self.logprobs) - step.start :]
            self._num_known = len(self.logprobs)

    def append_embeddings(self, end: int, count: int, values: bytes) -> None:
        """Append what a step made of the `count` positions before `end`, [count, size]."""
        new = end - self._num_known
        self.embedding += values[len(values) // count * (count - new) :]
        self._num_known = end
