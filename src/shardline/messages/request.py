"""A request, as the front sends it to the engine, and what the engine answers: token ids only."""

from __future__ import annotations

from typing import Literal

import msgspec

from shardline.messages.timeline import EngineTimeline
from shardline.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class Constraints(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens an output may have, whatever their logits are."""

    grammar: str = ""
    """A grammar's text, see `structured.grammar`; empty: there is none."""
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all tokens."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the output must not contain."""


class PromptEmbeds(msgspec.Struct, frozen=True, array_like=True):
    """Rows that stand in a prompt in place of the embedding's; the token ids at their places mean nothing."""

    rows: bytes
    """[num_rows, hidden_size] float32, one after another."""
    places: list[tuple[int, int]]
    """The first position and the number of rows of each run, in their order."""


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter by its content."""

    digest: str
    """Of everything in it; adapters with equal ones give equal answers."""
    folder: str
    """Where each host finds it."""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of one user request, as the engine sees it: token ids only.

    A user request with n > 1 becomes n of these, which differ only in `request_id` and `choice`.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    """`seed` and `max_tokens` are never None here."""
    output_token_ids: list[int] = []
    """Tokens that another replica, or another server, has generated before it failed; the output goes on after them."""
    expected_token_ids: list[int] = []
    """The output of the request when it ran before: steps compute many of these tokens at once, as drafts. The output
    ends at the first token that differs."""
    choice: int = 0
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    """Requests with a lower number run first."""
    arrival_time: float = 0.0
    """Seconds, time.monotonic() of the front process."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""
    owner: str = ""
    """Whose it is: the answers of one owner never make those of another one faster."""
    constraints: Constraints | None = None
    embeds: PromptEmbeds | None = None
    adapter: AdapterRef | None = None
    """None: the model as it is."""
    streamed: bool = True
    """Whether the user reads the tokens as they come. If not, the engine may send several tokens in one message."""

    @property
    def variant(self) -> str:
        """The digest of its adapter; empty: the model as it is. Equal prompts of different ones share no cache."""
        return "" if self.adapter is None else self.adapter.digest


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of one token and of others in its place; see `--logprobs-mode` for what they are made of."""

    logprob: float
    rank: int
    """Rank of the chosen token by probability; 1: it was the most likely one."""
    top_ids: list[int]
    """The most likely tokens, or the chosen one and those that the request names."""
    top_logprobs: list[float]
    top_ranks: list[int] = []
    """Empty: 1, 2, 3 and so on."""


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step produced for one Request: the engine's message to the front."""

    request_id: str
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
    """float32 [tokens, size]: the final hidden state, or the labels' logits, of the prompt's last token, or of all of
    its tokens if `prompt_logprobs` is set; empty unless prompts are embedded."""
    timeline: EngineTimeline | None = None
    """Everything that the engine has noted so far; None: it is as the front has it, apart from further tokens."""
    refused: bool = False
    """Whether what the request asks for is at fault, so that its client gets a 4xx."""
