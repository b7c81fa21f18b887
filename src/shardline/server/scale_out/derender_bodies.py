"""The bodies of …/derender: answers of /inference/v1/generate, and what a stream's client keeps between chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, cast

import msgspec
from pydantic import ConfigDict, Field

from shardline.messages.request import TokenLogprobs
from shardline.server.errors import bad_request
from shardline.server.json_body import RequestModel
from shardline.server.openai.chat.request import ChatRequest
from shardline.server.openai.completions.request import CompletionRequest
from shardline.server.openai.protocol import MAX_CHOICES_PER_HTTP_REQUEST, TokenIds

MAX_ANSWERS = 1024
"""The most answers of `generate_responses`."""

T = TypeVar("T")


class Score(RequestModel):
    """The log probability of a token at one position."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    token_id: int
    logprob: float
    rank: int | None = None


class TokenScore(Score):
    """That of the token there, with those of the likeliest ones."""

    top_logprobs: list[Score] = Field(default_factory=list)


class Scores(RequestModel):
    """Those of all tokens of a choice."""

    content: list[TokenScore] | None = None


class TokenChoice(RequestModel):
    """A choice of an answer or of a chunk."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    index: int
    token_ids: TokenIds | None = None
    logprobs: Scores | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def scores(self, most: int | None) -> list[TokenLogprobs] | None:
        """The log probabilities of the tokens; `most`: how many tokens each position has; None: all that are there."""
        if self.logprobs is None or self.logprobs.content is None:
            return None
        scores = []
        for token in self.logprobs.content:
            top = sorted(token.top_logprobs, key=lambda one: one.rank or 0)[:most]  # the chosen token came first
            ids, ranks = [one.token_id for one in top], [one.rank or 0 for one in top]
            scores.append(TokenLogprobs(token.logprob, token.rank or 0, ids, [one.logprob for one in top], ranks))
        return scores


class TokenUsage(RequestModel):
    """How many tokens there were."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class TokenAnswer(RequestModel):
    """An answer of /inference/v1/generate in the mode "tokens", or a chunk of one. Other fields may be passed on."""

    model_config = ConfigDict(extra="allow", frozen=True)

    request_id: Annotated[str, Field(max_length=1024)]
    choices: Annotated[list[TokenChoice], Field(max_length=MAX_CHOICES_PER_HTTP_REQUEST)]
    usage: TokenUsage | None = None
    prompt_token_ids: TokenIds | None = None


class WholeAnswer(TokenAnswer):
    """A whole answer: unlike a chunk, it always has a choice."""

    choices: Annotated[list[TokenChoice], Field(min_length=1, max_length=MAX_CHOICES_PER_HTTP_REQUEST)]


class StreamState(RequestModel):
    """What the client of a stream keeps for the next chunk."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    output_token_ids: TokenIds = Field(default_factory=list)
    output_chunk_lens: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """How the tokens came in chunks."""


class DerenderBody(RequestModel):
    """What both bodies have."""

    stream: bool | None = None
    model: str | None = None
    generate_chunk: TokenAnswer | None = None
    stream_state: StreamState | None = None

    def chunk(self) -> TokenAnswer:
        """The chunk of a stream.

        Raises:
            ApiError: 400, it is not there, it has several choices, or what came before it is malformed.
        """
        if self.generate_chunk is None:
            raise bad_request("'stream' needs 'generate_chunk'.", "generate_chunk", "missing_required_parameter")
        if len(self.generate_chunk.choices) > 1:
            raise bad_request(
                "'generate_chunk' must have at most one choice: each has its own state.", "generate_chunk"
            )
        state = self.stream_state or StreamState()
        if sum(state.output_chunk_lens) != len(state.output_token_ids):
            raise bad_request(
                "invalid stream_state: the lengths of its chunks are not those of its tokens", "stream_state"
            )
        return self.generate_chunk


class DerenderChatRequest(DerenderBody):
    """The body of POST /v1/chat/completions/derender."""

    generate_response: WholeAnswer | None = None
    """The answer; a stream has `generate_chunk`, and `stream_state` of the last answer here."""
    prompt_tokens: int | None = None
    prompt_token_ids: TokenIds | None = None
    chat_request: ChatRequest | None = None
    """What was rendered. It says which tools there are, and what the answer shows."""


class DerenderCompletionRequest(DerenderBody):
    """The body of POST /v1/completions/derender."""

    generate_responses: Annotated[list[WholeAnswer], Field(min_length=1, max_length=MAX_ANSWERS)] | None = None
    """The answers, one for each prompt."""
    prompt_tokens: int | list[int] | None = None
    """One for each answer; in a stream, one."""
    prompt_token_ids: TokenIds | list[TokenIds | None] | None = None
    """As `prompt_tokens`."""
    completion_request: CompletionRequest | None = None

    def counts(self, count: int) -> list[int | None]:
        """`prompt_tokens` of each answer.

        Raises:
            ApiError: 400, there are more or fewer than answers.
        """
        given = self.prompt_tokens
        return _one_each("prompt_tokens", given if isinstance(given, list) or given is None else [given], count)

    def prompts(self, count: int) -> list[list[int] | None]:
        """`prompt_token_ids` of each answer.

        Raises:
            ApiError: 400, there are more or fewer than answers.
        """
        given = cast("list[Any] | None", self.prompt_token_ids)
        if given and isinstance(given[0], int):
            given = [given]
        return _one_each("prompt_token_ids", given, count)


def _one_each(name: str, given: Sequence[T] | None, count: int) -> list[T | None]:
    if given is None:
        return [None] * count
    if len(given) != count:
        raise bad_request(f"{name} length ({len(given)}) must be that of generate_responses ({count}).", name)
    return list(given)


class DerenderedChunk(msgspec.Struct, frozen=True):
    """A chunk of a stream, and what its client sends with the next one."""

    chunk: dict[str, Any]
    stream_state: dict[str, Any]
