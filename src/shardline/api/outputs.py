"""What a user reads: the output of a request, with all of its choices."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shardline.api.logprobs import Decode, Logprob, decode_nothing, logprobs_by_token
from shardline.messages.request import FinishReason, TokenLogprobs
from shardline.messages.timeline import RequestMetrics
from shardline.receipts.receipt import Receipt
from shardline.sampling_params import SamplingParams

EMBEDDING_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
"""The parameters of a request that is embedded. No token is generated."""
TOKEN_EMBEDDING_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
"""The same if every token of the prompt is embedded."""


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One choice of a finished or running request."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    token_logprobs: list[TokenLogprobs] | None = None
    """One entry for each token; None: the request did not ask for them. `logprobs` has them in vLLM's shape."""
    decode: Decode = decode_nothing
    digests: list[str] | None = None
    receipt: Receipt | None = None
    """There once the choice has ended, if the request asked for it."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the choice; None: it ended otherwise, or has not ended."""
    error: str = ""
    """What happened, if the finish reason is "error"."""
    refused: bool = False
    """Whether what the request asks for is at fault."""
    embedding: bytes = b""
    """See `SequenceOutput`."""
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
    finished: bool = False
    """Whether every choice has ended."""
    shaped_prompt_logprobs: list[dict[int, Logprob] | None] = []
    """What `prompt_logprobs` has made so far."""

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """For each prompt token, its log probability and those of the most likely tokens, by token id.

        The first token has None, since nothing precedes it. None instead of a list: the request did not ask for them.
        """
        if self.prompt_token_logprobs is None:
            return None
        if not self.shaped_prompt_logprobs:
            pairs = zip(self.prompt_token_ids[1:], self.prompt_token_logprobs, strict=True)
            shaped = (logprobs_by_token(token_id, chosen, self.decode) for token_id, chosen in pairs)
            self.shaped_prompt_logprobs = [None, *shaped]
        return self.shaped_prompt_logprobs


class Deltas:
    """Cuts the outputs of one request to what is new since the output before."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, int, bool]] = {}
        """For each choice, the tokens and the characters that it had, and whether it had ended."""

    def take(self, output: RequestOutput) -> RequestOutput:
        """The output with its new part only: of choices that have one, or that end with it."""
        changed = []
        for choice in output.outputs:
            before = num_tokens, num_chars, _ = self._sent.get(choice.index, (0, 0, False))
            now = len(choice.token_ids), len(choice.text), choice.finished()
            if now == before:
                continue
            self._sent[choice.index] = now
            changed.append(
                msgspec.structs.replace(
                    choice,
                    text=choice.text[num_chars:],
                    token_ids=choice.token_ids[num_tokens:],
                    token_logprobs=choice.token_logprobs and choice.token_logprobs[num_tokens:],
                    digests=choice.digests and choice.digests[num_tokens:],
                    shaped_logprobs=[],
                )
            )
        return msgspec.structs.replace(output, outputs=changed)


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    """The score of each label for one prompt, in the order of the model's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    """How well two texts fit."""

    score: float
