"""A sequence in the engine: its tokens, its blocks, and the timeline of what happens to it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardline.engine.scheduling.prompt_report import PromptReport
from shardline.messages.request import FinishReason, Request
from shardline.messages.timeline import EngineTimeline, Preemption, PrefillChunk

MOST_CHUNKS = 128
"""Chunks that are listed; further ones become part of the last one, so that a message stays small."""


@dataclass(slots=True)
class TimelineRecorder:
    """The timeline of one sequence. `now` is in seconds of any clock; a changed timeline is reported with a token."""

    added: float
    scheduled: float = -1.0
    first_token: float = -1.0
    chunks: list[PrefillChunk] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    awaits_token: bool = True
    """Whether the next token is its first one, or the first one after a preemption."""
    num_guessing_steps: int = 0
    num_guesses: int = 0
    num_right_guesses: int = 0

    def note_start(self, now: float) -> None:
        """It is part of a step, for the first time or again after a preemption."""
        if self.scheduled < 0:
            self.scheduled = now - self.added

    def note_chunk(self, start: int, num_tokens: int, planned: float, now: float) -> None:
        """A step computed several tokens that were known before."""
        if len(self.chunks) == MOST_CHUNKS:
            last = self.chunks[-1]
            seconds = now - self.added - last.at
            self.chunks[-1] = PrefillChunk(last.start, last.num_tokens + num_tokens, last.at, seconds)
        else:
            self.chunks.append(PrefillChunk(start, num_tokens, planned - self.added, now - planned))

    def note_preemption(self, num_lost_tokens: int, now: float) -> None:
        """It has lost its blocks."""
        self.preemptions.append(Preemption(now - self.added, num_lost_tokens, 0.0))
        self.awaits_token = True

    def note_token(self, now: float, *, running: bool) -> None:
        """A token has come; `running`: it was not planned before the last preemption."""
        at = now - self.added
        if self.first_token < 0:
            self.first_token = at
        if not running:
            return
        self.awaits_token = False
        # Preemptions before the same token share their cost: each counts until the next one.
        for index in range(len(self.preemptions) - 1, -1, -1):
            one = self.preemptions[index]
            if one.seconds:
                break
            self.preemptions[index] = Preemption(one.at, one.num_lost_tokens, at - one.at)
            at = one.at

    def timeline(self) -> EngineTimeline:
        """Everything so far."""
        chunks, preemptions = list(self.chunks), list(self.preemptions)
        guesses = self.num_guessing_steps, self.num_guesses, self.num_right_guesses
        return EngineTimeline(self.scheduled, self.first_token, chunks, preemptions, *guesses)


class State(enum.Enum):
    """Where a sequence stands. It may hold blocks in every state but WAITING, PARKED and FETCHING."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    """It waits again as soon as its plans in flight are collected; their results still count."""
    PARKED = enum.auto()
    """It waits as soon as the mask of its next token and its adapter are there."""
    FETCHING = enum.auto()
    """It waits as soon as plans in flight have fetched blocks of its prefix."""
    FINISHED = enum.auto()
    """The front has its last output; further results of its plans in flight are dropped."""


@dataclass(eq=False)
class KVState:
    """The blocks of one sequence. Only KVCache writes here.

    All groups' tables have the same length; entries that slid out of a group's window are NULL_BLOCK.
    """

    tables: list[list[int]]
    num_slid: list[int]
    """Per group, leading entries that are null."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks of tokens; they stay valid when blocks are freed."""
    num_published: int = 0
    """Leading blocks whose content is published, or was published before they slid out of a window."""
    num_sent: int = 0
    """Leading entries of each table that a plan has carried."""


@dataclass(eq=False)
class LiveSequence:
    """One request in the engine, from its arrival to its last output. Only SequenceQueues writes `state`.

    Invariants: num_computed <= num_scheduled <= num_tokens, and len(tokens) < limit until it is finished. Plans in
    flight compute the tokens from num_computed to num_scheduled.
    """

    request: Request
    limit: int
    """The most tokens that prompt and output may have together."""
    order: tuple[int, float, int]
    """(priority, arrival time, number); the sequence with the smallest order goes first."""
    tokens: list[int]
    """The prompt, then the output as far as it is known."""
    kv: KVState
    seq_id: int = -1
    """The id by which workers know it; each start gives it a new one."""
    state: State = State.WAITING
    num_start_tokens: int = 0
    """Tokens that the workers got when it last started."""
    num_computed: int = 0
    """Tokens whose KV is in the cache according to the collected results."""
    num_scheduled: int = 0
    """Tokens whose KV is in the cache once all plans in flight are collected."""
    num_pending: int = 0
    """Tokens that plans in flight will sample."""
    num_in_flight: int = 0
    """Plans in flight that hold it."""
    last_step: int = -1
    """The last plan that held it."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it first started; None before."""
    blocks_wanted: int = 0
    """Free blocks that it needs to start, according to its last look-up in the prefix cache."""
    next_lookup: int = 0
    """The first step in which it may look its prefix up again while there are too few free blocks."""
    fetched: tuple[int, int] | None = None
    """From where to where it has had tokens of its prefix fetched since it last had none; None: it has not waited. See
    `KVCache.lookup_prefix`."""
    stop_token_ids: frozenset[int] = frozenset()
    report: PromptReport | None = None
    """What its request wants to know of all positions of the prompt; None: nothing."""
    mask_key: int = -1
    """What its masks are asked for by, if it has a grammar."""
    allowed: bytes = b""
    """The tokens that its grammar allows next, and after each of `foreseen`, see `SequenceStep.allowed`."""
    foreseen: list[int] = field(default_factory=list)
    """Guesses of its next tokens that its grammar allows; the next step may have them."""
    awaits_draft: bool = False
    """A plan in flight has a draft of it, so where its next step begins is not known."""
    awaits_mask: bool = False
    """Whether it has a grammar and `allowed` is not known yet, so that its next token cannot be sampled."""
    adapter_slot: int = -1
    """The slot of its adapter; negative: it has none, or the ranks have not loaded it yet."""
    recorder: TimelineRecorder = field(default_factory=lambda: TimelineRecorder(0.0))

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        # With the first output the user has had them.
        if sampling.prompt_logprobs is not None and not self.request.output_token_ids:
            self.report = PromptReport(len(self.request.prompt_token_ids))
        eos = () if sampling.ignore_eos else self.request.eos_token_ids
        self.stop_token_ids = frozenset((*eos, *sampling.stop_token_ids))
        self.awaits_mask = self.has_grammar

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar constrains its output."""
        return self.request.constraints is not None and bool(self.request.constraints.grammar)

    @property
    def awaits_adapter(self) -> bool:
        """Whether it has an adapter that the ranks have not loaded yet."""
        return self.request.adapter is not None and self.adapter_slot < 0

    @property
    def num_tokens(self) -> int:
        """Tokens once all plans in flight are collected and none of them stopped it."""
        return len(self.tokens) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens that are not part of any plan yet."""
        return len(self.tokens) + self.num_pending - self.num_scheduled

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens that are known."""
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def expects(self) -> bool:
        """Whether its request expects tokens, so that it has no other drafts."""
        return bool(self.request.expected_token_ids)

    @property
    def has_own_draft(self) -> bool:
        """Whether its next draft does not come from a proposer at the time of the plan."""
        return bool(self.foreseen) or self.expects

    @property
    def may_expect(self) -> bool:
        """Whether its expected tokens can be drafts at once. A grammar must allow them before, see `foreseen`."""
        return not self.has_grammar

    def begin_run(self, seq_id: int, num_cached_tokens: int) -> None:
        """Note that workers get all tokens known now, and that the first `num_cached_tokens` need no computation."""
        self.seq_id = seq_id
        self.num_start_tokens = len(self.tokens)
        self.num_computed = self.num_scheduled = num_cached_tokens

    def forget_computed(self) -> None:
        """Note that it has lost its blocks, and so everything that was computed."""
        self.num_computed = self.num_scheduled = self.blocks_wanted = self.next_lookup = 0
        self.fetched = None

    def append_tokens(self, token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Append generated tokens, up to the one that finishes the sequence.

        Returns how many were appended, and the reason if the sequence is finished. A stop token finishes it only if
        there are at least `min_tokens` generated tokens, the stop token included. An output that is expected ends at
        the first token that differs.
        """
        tokens, expected = self.tokens, self.request.expected_token_ids
        for count, token_id in enumerate(token_ids, 1):
            tokens.append(token_id)
            if expected and expected[self.num_output_tokens - 1 : self.num_output_tokens] != [token_id]:
                return count, "stop"
            if token_id in self.stop_token_ids and self.num_output_tokens >= self.request.sampling.min_tokens:
                return count, "stop"
            if len(tokens) >= self.limit:
                return count, "length"
        return len(token_ids), None
