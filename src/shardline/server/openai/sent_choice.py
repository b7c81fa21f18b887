"""How much of a growing answer has been sent, and what is new of it."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.api.outputs import CompletionOutput
from shardline.messages.request import FinishReason, TokenLogprobs
from shardline.receipts.receipt import Receipt


@dataclass
class Delta:
    """What has been added to one choice since the last delta."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    digests: list[str] | None
    receipt: Receipt | None
    """There once the choice has ended, if the request asked for it."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class SentChoice:
    """How much of one choice has been sent."""

    __slots__ = ("finished", "num_chars", "num_tokens")

    def __init__(self) -> None:
        self.num_chars = 0
        self.num_tokens = 0
        self.finished = False

    def take_text(self, output: CompletionOutput) -> str:
        """The text that is new in an output that has not ended; it counts as sent from now on."""
        text = output.text[self.num_chars :]
        if text:
            self.num_chars += len(text)
            self.num_tokens = len(output.token_ids)
        return text

    def take_delta(self, output: CompletionOutput, *, tokens_matter: bool) -> Delta | None:
        """What is new in `output`; it counts as sent from now on. None: nothing is new.

        Tokens without text, such as half a character, are new only if `tokens_matter`.
        """
        if self.finished:
            return None
        text = output.text[self.num_chars :]
        first = self.num_tokens
        grown = tokens_matter and len(output.token_ids) > first
        if not (text or grown or output.finish_reason is not None):
            return None
        self.num_chars += len(text)
        self.num_tokens = len(output.token_ids)
        self.finished = output.finish_reason is not None
        return Delta(
            text,
            output.token_ids[first:],
            None if output.token_logprobs is None else output.token_logprobs[first : self.num_tokens],
            None if output.digests is None else output.digests[first : self.num_tokens],
            output.receipt,
            output.finish_reason,
            output.stop_reason,
        )
